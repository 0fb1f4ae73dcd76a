"""Finds the attention modules of a model, and assigns each to a stack and a layer."""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from attnscope.errors import InputError, ModelError
from attnscope.interception.families import (
    CROSS_ATTENTION,
    MODALITY_TOWERS,
    NOT_ATTENTION,
    NUMBERED_BY_ORDER,
    POOLING_HEADS,
    SHARED_MODULES,
)

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
    single_stack: bool
    """Whether all sites have one stack and one kind, and each runs once in a pass."""
    model: nn.Module
    """The model that contains the sites."""
    left_out: tuple[str, ...]
    """The lists of attention layers that are not measured: vision and audio towers."""
    structure: int
    """A hash of the model's modules, their classes and their `forward`."""

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


def find(model: nn.Module) -> Sites:
    """The attention modules of a model; an error if it has none, or too many stacks."""
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"{type(model).__name__} is not a transformers model; pass the PreTrainedModel "
            "inside it",
            code="not-a-transformers-model",
            model=type(model).__name__,
        )
    sites = _search(model)
    _refuse_parallel_heads(sites)
    return sites


def _refuse_parallel_heads(sites: Sites) -> None:
    """Raise an error if tensor parallelism splits the heads of a layer over processes."""
    ranks = getattr(sites.model, "_tp_size", None) or 1
    weights: Iterable[Any] = (weight for module in sites.modules for weight in module.parameters())
    for weight in (weight for weight in weights if hasattr(weight, "device_mesh")):
        mesh: Any = weight.device_mesh
        names = mesh.mesh_dim_names or ("",)
        for name, placement in zip(names, weight.placements, strict=False):
            if placement.is_shard() and "dp" not in name and (name or not _fully_sharded(sites)):
                ranks = max(ranks, mesh.size(names.index(name)))
    if ranks > 1:
        raise ModelError(
            f"tensor parallelism splits the heads of {type(sites.model).__name__} over {ranks} "
            "processes, and attnscope needs all heads in one process; load the model in one "
            "process, or with device_map='auto'",
            code="tensor-parallel",
            ranks=ranks,
        )


def _fully_sharded(sites: Sites) -> bool:
    """Whether FSDP gathers the weights before use, so that each process has all heads."""
    classes = {cls for module in sites.model.modules() for cls in type(module).__mro__}
    return any(cls.__name__ == "FSDPModule" for cls in classes)


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
    named = _named_modules(model)
    attention = [name for name, module in named.items() if _is_attention(module)]
    if not attention:
        raise ModelError(
            f"{type(model).__name__} has no attention layers that attnscope can find: no class has "
            "Attention in its name or calls ALL_ATTENTION_FUNCTIONS; models without attention "
            "(Mamba, RWKV …) cannot be measured",
            code="no-attention",
        )
    interface = {name for name in attention if _uses_interface(named[name])}
    alone = {name for name in attention if _names(named[name]) & _ATTENTION}
    everything = _stacks(attention, interface, alone)
    stacks = _text_stacks(model, everything)
    sites: dict[str, Site] = {}
    base_models: dict[str, str] = {}
    shared_stacks: dict[str, int] = {}
    for prefix, names in stacks.items():
        stack = _stack(prefix, named[names[0]])
        loop = SHARED_MODULES.get(type(named[names[0]]).__name__)
        if stack in base_models and loop is None:
            raise _too_many(model, stacks)
        if loop is not None:
            shared_stacks[stack] = loop(model.config)
        numbered = _numbered(names, named, stack)
        if loop is None and len(set(numbered.values())) < len(numbered):
            raise _too_many(model, stacks)
        sites |= numbered
        base_models[stack] = _innermost_model(
            named, [n for n, s in sites.items() if s.stack == stack]
        )
    if all(site.kind == "cross" for site in sites.values()):
        raise _too_many(model, everything)
    all_sites = {site for site in sites.values() if site.stack not in shared_stacks}
    for stack, layers in shared_stacks.items():
        all_sites |= {Site(stack, layer) for layer in range(layers)}
    stacks_by_kind = {(site.stack, site.kind) for site in sites.values()}
    return Sites(
        modules={named[name]: site for name, site in sites.items()},
        base_models={stack: named[name] for stack, name in base_models.items()},
        non_interface=frozenset(named[n] for n in sites if not _names(named[n]) & _INTERFACE),
        hooked=frozenset(named[n] for n in sites if not _always_calls_interface(named[n])),
        shared_stacks=shared_stacks,
        all_sites=sorted(all_sites),
        single_stack=len(stacks_by_kind) == 1 and not shared_stacks,
        model=model,
        left_out=tuple(prefix for prefix in everything if prefix not in stacks),
        structure=_structure(named),
    )


def _named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """`dict(model.named_modules())` in half the time, because every watch calls it."""
    names: dict[nn.Module, str] = {}

    def walk(module: nn.Module, name: str) -> None:
        names[module] = name
        prefix = f"{name}." if name else ""
        for step, child in module._modules.items():
            if child is not None and child not in names:
                walk(child, prefix + step)

    walk(model, "")
    return {name: module for module, name in names.items()}


def _stacks(attention: list[str], interface: set[str], alone: set[str]) -> dict[str, list[str]]:
    """List of layers → its attention modules.

    These are the modules that use the interface, and those that compute attention `alone`.
    """
    stacks: dict[str, list[str]] = {}
    for name in attention:
        stacks.setdefault(_list_of_layers(name), []).append(name)
    for prefix, names in stacks.items():
        selected = [name for name in names if name in interface]
        others = [name for name in names if name in alone or not selected]
        if len(selected) < len(names):
            inside = tuple(f"{name}." for name in selected)
            others = [
                n
                for n in others
                if not any(o.startswith(f"{n}.") for o in attention) and not n.startswith(inside)
            ]
            selected = [name for name in names if name in {*selected, *others}]
        stacks[prefix] = selected
    return {prefix: names for prefix, names in stacks.items() if names}


def _text_stacks(model: PreTrainedModel, stacks: dict[str, list[str]]) -> dict[str, list[str]]:
    """The stacks without vision and audio towers."""
    if len(stacks) > 1:
        text = {
            prefix: names for prefix, names in stacks.items() if not MODALITY_TOWERS.search(prefix)
        }
        stacks = text or stacks
        stacks = {
            p: names for p, names in stacks.items() if not in_pooling_head(model, p)
        } or stacks
    all_shared = all(
        type(model.get_submodule(names[0])).__name__ in SHARED_MODULES for names in stacks.values()
    )
    if len(stacks) == 1 or all_shared or getattr(model.config, "is_encoder_decoder", False):
        return stacks
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    inside = set(decoder.modules()) if decoder is not None else set()
    text = {
        prefix: names
        for prefix, names in stacks.items()
        if all(model.get_submodule(name) in inside for name in names)
    }
    if len(text) != 1:
        raise _too_many(model, stacks)
    return text


def in_pooling_head(model: nn.Module, name: str) -> bool:
    """Whether the module of this name is part of a pooling head."""
    while name:
        try:
            module = model.get_submodule(name)
        except AttributeError:  # the name of a class that is not in the model
            return False
        if POOLING_HEADS.search(type(module).__name__):
            return True
        name = name.rpartition(".")[0]
    return False


def _too_many(model: nn.Module, stacks: dict[str, list[str]]) -> ModelError:
    names = [name for names in stacks.values() for name in names[:2]]
    parts = [
        name
        for name, module in model.named_modules()
        if name and isinstance(module, PreTrainedModel) and _one_stack(name, stacks)
    ]
    what = (
        "watch one of its parts: " + ", ".join(f"watch(model.{part})" for part in parts)
        if parts
        else "none of its parts is a PreTrainedModel, so it cannot be watched"
    )
    return ModelError(
        f"{type(model).__name__} has more than one stack of attention layers "
        f"({', '.join(names[:4])} …); {what}",
        code="more-than-one-stack",
        parts=parts,
    )


def _one_stack(part: str, stacks: dict[str, list[str]]) -> bool:
    inside = [[name.startswith(f"{part}.") for name in names] for names in stacks.values()]
    return sum(map(any, inside)) == 1


def _innermost_model(named: dict[str, nn.Module], sites: Iterable[str]) -> str:
    around = [
        name
        for name, module in named.items()
        if isinstance(module, PreTrainedModel)
        and all(not name or site.startswith(f"{name}.") for site in sites)
    ]
    return max(around, key=len)


def _list_of_layers(name: str) -> str:
    """The list of layers that contains a module: its name up to the first number."""
    return re.split(r"(?:^|\.)\d+(?=\.|$)", name, maxsplit=1)[0]


def _stack(prefix: str, module: nn.Module) -> str:
    named = [part for part in prefix.split(".") if part in ("encoder", "decoder")]
    if named:
        return named[0]
    causal = getattr(module, "is_causal", getattr(module, "is_decoder", True))
    return "decoder" if causal else "encoder"


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


def argument(module: nn.Module, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """An argument of a module's call, by position or keyword; None if it was not passed."""
    if name in kwargs or not args:
        return kwargs.get(name)
    return inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments.get(name)


_INTERFACE = {"ALL_ATTENTION_FUNCTIONS"}
_ATTENTION = {"scaled_dot_product_attention", "softmax"}


def _uses_interface(module: nn.Module) -> bool:
    """Whether the `forward` of a module or of its class calls the attention interface."""
    instance_forward = _own_forward(module)
    names = _names_in(type(module).forward)
    return bool(
        (names if instance_forward is None else names | _names_of(instance_forward)) & _INTERFACE
    )


def _always_calls_interface(module: nn.Module) -> bool:
    """Whether a module uses the interface for eager attention too."""
    instance_forward = _own_forward(module)
    names = (
        _names_in(type(module).forward) if instance_forward is None else _names_of(instance_forward)
    )
    return {"ALL_ATTENTION_FUNCTIONS", "get_interface"} <= names


def _names(module: nn.Module) -> frozenset[str]:
    """The names that the methods of a module use."""
    instance_forward = _own_forward(module)
    cls: Any = type(module)
    names = _names_in_class(cls)
    return names if instance_forward is None else names | _names_of(instance_forward)


@lru_cache(maxsize=1024)
def _names_in_class(cls: Any) -> frozenset[str]:
    classes = [c for c in cls.__mro__ if not c.__module__.startswith(("torch.", "builtins"))]
    methods = [method for c in classes for method in vars(c).values() if callable(method)]
    return frozenset().union(*map(_names_of, methods))


def _names_of(function: Any) -> frozenset[str]:
    """The names that the code of a function uses."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return frozenset(() if code is None else code.co_names)


@lru_cache(maxsize=4096)  # a model has hundreds of modules and few classes
def _names_in(forward: Callable[..., Any]) -> frozenset[str]:
    return _names_of(forward)


def _own_forward(module: nn.Module) -> Any:
    """The `forward` that was set on the instance; None if it uses that of its class."""
    instance_forward = module.__dict__.get("forward")
    return getattr(instance_forward, "__func__", instance_forward)


def _structure(named: dict[str, nn.Module]) -> int:
    classes: tuple[type[nn.Module], ...] = tuple(map(type, named.values()))
    forwards = tuple(id(_own_forward(m)) for m in named.values() if "forward" in m.__dict__)
    return hash((tuple(named), classes, forwards, frozenset((c, c.forward) for c in classes)))


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__
    return ("Attention" in name or _uses_interface(module)) and name not in NOT_ATTENTION


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
