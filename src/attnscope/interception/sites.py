"""Finds the attention modules of a model, and assigns each to a stack and a layer."""

import re
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from attnscope.errors import InputError, ModelError
from attnscope.interception.families import (
    CROSS_ATTENTION,
    NOT_ATTENTION,
    NUMBERED_BY_ORDER,
    SHARED_MODULES,
)
from attnscope.interception.module_code import (
    INTERFACE,
    always_calls_interface,
    forward_names,
    method_names,
    structure,
)
from attnscope.interception.split_heads import SplitHeads, refused, split_heads
from attnscope.interception.stacks import (
    innermost_model,
    stack_name,
    stacks_of,
    text_stacks,
    too_many_stacks,
)
from attnscope.interception.wrappers import compiled_function, unwrapped

Kind = Literal["self", "cross"]


class Site(NamedTuple):
    """The site of an attention module; a tuple, because every call of a layer uses it as a key."""

    stack: str
    """The stack of layers it belongs to: "decoder", "encoder" …"""
    layer: int
    """In the model's own numbering, from 0."""
    kind: Kind = "self"
    """Self-attention ("self"), or cross-attention to another text ("cross")."""

    @property
    def part(self) -> str:
        """The part of a scope that holds its results: "cross", or else its stack."""
        return "cross" if self.kind == "cross" else self.stack


@dataclass(frozen=True, slots=True)
class Sites:
    """The attention modules of a model."""

    modules: dict[nn.Module, Site]
    """Module → site."""
    base_models: dict[str, nn.Module]
    """Stack → the innermost PreTrainedModel around it; one call of it is one forward pass."""
    non_interface: frozenset[nn.Module]
    """The modules that do not use the attention interface of transformers."""
    hooked: frozenset[nn.Module]
    """These, and the modules that may or may not use it; only a run shows which."""
    shared_stacks: dict[str, int]
    """Stacks whose modules run several times in a pass, each time as the next layer → layers."""
    all_sites: list[Site]
    """All sites, in order."""
    model: nn.Module
    """The model that contains the sites."""
    left_out: tuple[str, ...]
    """The lists of attention layers that are not measured: vision and audio towers."""
    structure: int
    """A hash of the model's modules, their classes and their `forward`."""
    compiled: dict[nn.Module, FunctionType] = field(default_factory=dict)
    """The modules that were compiled by themselves, with what `torch.compile` returned."""
    split: SplitHeads | None = None
    """The processes that share the heads; None if this one has all."""

    @property
    def base_model(self) -> nn.Module:
        """The base model of the only stack with self-attention."""
        (stack,) = self.stacks
        return self.base_models[stack]

    @property
    def stacks(self) -> list[str]:
        """The stacks with self-attention, sorted."""
        return sorted({site.stack for site in self.modules.values() if site.kind == "self"})

    @property
    def layers(self) -> list[int]:
        """The layers with attention, in order."""
        return sorted({site.layer for site in self.all_sites})


def has_attention(model: nn.Module) -> bool:
    """Whether the model has an attention module."""
    return any(_is_attention(module) for module in model.modules())


def find(model: nn.Module, *, split: bool = False) -> Sites:
    """The attention modules of a model; an error if it has none, or too many stacks.

    The model may be in a wrapper of PEFT, `torch.compile` or data parallelism. `split` says whether
    the caller supports heads that tensor parallelism splits over processes.
    """
    sites = _search(unwrapped(model))
    heads = split_heads(sites.model, sites.modules)
    if heads is not None and not split:
        raise refused(sites.model, heads.size)
    return sites if heads is None else replace(sites, split=heads)


def device_of(sites: Sites) -> torch.device:
    """The device of the first attention layer."""
    module = next(
        (module for module, site in sites.modules.items() if site == sites.all_sites[0]), None
    )
    if module is None:  # a module that runs as several layers
        module = min(sites.modules, key=sites.modules.__getitem__)
    hook = getattr(module, "_hf_hook", None)  # accelerate may keep the weights elsewhere
    device = getattr(hook, "execution_device", None)
    if device is not None:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    for part in (module, *module._modules.values()):  # most modules have a weight here
        for weight in part._parameters.values() if part is not None else ():
            if weight is not None:
                return weight.device
    # Modules of torch.ao hold packed weights and compute on the CPU.
    tensors = (*module.parameters(), *module.buffers(), *sites.model.parameters())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _search(model: PreTrainedModel) -> Sites:
    named = dict(model.named_modules())
    attention = [name for name, module in named.items() if _is_attention(module)]
    if not attention:
        raise ModelError(
            f"{type(model).__name__} has no attention layers that attnscope can find: no class has "
            "Attention in its name or calls ALL_ATTENTION_FUNCTIONS; models without attention "
            "(Mamba, RWKV …) cannot be measured",
            code="no-attention",
        )
    everything = stacks_of(named, attention)
    stacks = text_stacks(model, everything)
    sites: dict[str, Site] = {}
    base_models: dict[str, nn.Module] = {}
    shared_stacks: dict[str, int] = {}
    for prefix, names in stacks.items():
        first = named[names[0]]
        stack, loop = stack_name(prefix, first), SHARED_MODULES.get(type(first).__name__)
        if loop is not None:
            shared_stacks[stack] = loop(model.config)
        numbered = _numbered(names, named, stack)
        if loop is None and (stack in base_models or len({*numbered.values()}) < len(numbered)):
            raise too_many_stacks(model, stacks)
        sites |= numbered
        inside = [name for name, site in sites.items() if site.stack == stack]
        base_models[stack] = innermost_model(named, inside)
    if all(site.kind == "cross" for site in sites.values()):
        raise too_many_stacks(model, everything)
    all_sites = {site for site in sites.values() if site.stack not in shared_stacks}
    for stack, layers in shared_stacks.items():
        all_sites |= {Site(stack, layer) for layer in range(layers)}
    modules = {named[name]: site for name, site in sites.items()}
    return Sites(
        modules=modules,
        base_models=base_models,
        non_interface=frozenset(m for m in modules if INTERFACE not in method_names(m)),
        hooked=frozenset(m for m in modules if not always_calls_interface(m)),
        shared_stacks=shared_stacks,
        all_sites=sorted(all_sites),
        model=model,
        left_out=tuple(prefix for prefix in everything if prefix not in stacks),
        structure=structure(named),
        compiled={
            module: function
            for module in named.values()
            if (function := compiled_function(module)) is not None
        },
    )


def outer_models_of(sites: Sites) -> dict[nn.Module, list[nn.Module]]:
    """Base model → the models around it, if towers give it embeddings in place of token ids."""
    if not sites.left_out or len(sites.stacks) > 1:
        return {}
    base = sites.base_model
    around = [
        module
        for module in sites.model.modules()
        if isinstance(module, PreTrainedModel)
        and module is not base
        and any(part is base for part in module.modules())
    ]
    return {base: around}


def check_one_stack(sites: Sites) -> None:
    """Refuse a model with an encoder and a decoder, each with its own text."""
    if len(sites.stacks) > 1:
        raise InputError(
            "this model has an encoder and a decoder, each with its own text; use "
            "model.get_encoder() or model.get_decoder() in its place",
            code="encoder-decoder",
            stacks=list(sites.stacks),
        )


def validate_layers(sites: Sites, layers: Any) -> frozenset[int]:
    """The layers to measure; None means all. An error if a layer has no attention."""
    if layers is None:
        return frozenset(sites.layers)
    layers_asked = [layers] if isinstance(layers, int) else list(layers)
    for layer in layers_asked:
        if not isinstance(layer, int) or isinstance(layer, bool) or layer not in sites.layers:
            raise InputError(
                f"layer {layer!r} has no attention; the attention layers of this model are "
                f"{_ranges(sites.layers)} (counted from 0)",
                code="unknown-layer",
                value=layer,
                known=sites.layers,
            )
    if not layers_asked:
        raise InputError(
            "layers=[] selects no layer; pass layers=None to measure all layers",
            code="no-layers",
        )
    return frozenset(layers_asked)


def select_sites(sites: Sites, layers: Any) -> list[Site]:
    """The sites of the layers to measure."""
    if layers is None:
        return sites.all_sites
    measured = validate_layers(sites, layers)
    return [site for site in sites.all_sites if site.layer in measured]


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__
    return ("Attention" in name or INTERFACE in forward_names(module)) and name not in NOT_ATTENTION


def _numbered(names: list[str], named: dict[str, nn.Module], stack: str) -> dict[str, Site]:
    """Name → site for the modules of a stack.

    The layer is the module's `layer_idx`. If that is missing or not unique, it comes from the name.
    """
    kind_of_each: list[Kind] = [
        "cross" if CROSS_ATTENTION.search(name) else "self" for name in names
    ]
    numbers = [getattr(named[name], "layer_idx", None) for name in names]
    carried = all(isinstance(number, int) for number in numbers)
    if not carried or len(set(zip(kind_of_each, numbers, strict=True))) < len(names):
        numbers = [_number_in(name) for name in names]
    if type(named[names[0]]).__name__ in NUMBERED_BY_ORDER:
        numbers = list(range(len(names)))
    return {
        name: Site(stack, int(number or 0), kind)
        for name, number, kind in zip(names, numbers, kind_of_each, strict=True)
    }


def _number_in(name: str) -> int:
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    return int(numbers[0]) if numbers else 0


def _ranges(layers: list[int]) -> str:
    """Write layers as ranges: 0–27, not 0, 1, 2 …"""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
