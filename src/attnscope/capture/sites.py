"""Where a model attends: its self-attention modules, by layer, in the model's own numbering."""

import inspect
import re
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from attnscope.errors import InputError, ModelError

__all__ = ["Sites", "argument", "attends", "find", "restrict"]


@dataclass(frozen=True, slots=True)
class Sites:
    """The attention modules of one stack of layers."""

    modules: dict[nn.Module, int]
    """Module to layer."""
    base: nn.Module
    """The innermost model around all of them: one call of it is one forward pass."""
    interface: bool
    """Whether they go through the attention interface of transformers."""

    @property
    def layers(self) -> list[int]:
        """The layers that attend, in order."""
        return sorted(self.modules.values())


def attends(model: nn.Module) -> bool:
    """Whether anything in the model looks like attention."""
    return any(_looks_like_attention(module) for module in model.modules())


def find(model: nn.Module) -> Sites:
    """The attention modules of a model; a clear error where there are none or too many."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"{name} is not a transformers model; watch the PreTrainedModel inside it")
    parts = dict(model.named_children()) | dict(
        getattr(model, "model", nn.Module()).named_children()
    )
    if {"encoder", "decoder"} <= set(parts):
        raise ModelError(
            f"{name} has an encoder and a decoder, each with layers of its own; watch one of them: "
            "watch(model.get_encoder()) or watch(model.get_decoder())"
        )
    try:
        return _resolve(model, _found[model])
    except (KeyError, AttributeError):  # a new model, or one rebuilt since
        _found[model] = _search(model)
        return _resolve(model, _found[model])


@dataclass(frozen=True, slots=True)
class _Names:
    """Where the sites are, by name: a reference to a module would keep its model alive."""

    layers: dict[str, int]
    base: str
    interface: bool


# Walking a large model takes milliseconds, as long as some forward passes.
_found: WeakKeyDictionary[nn.Module, _Names] = WeakKeyDictionary()


def _resolve(model: nn.Module, names: _Names) -> Sites:
    modules = {model.get_submodule(name): layer for name, layer in names.layers.items()}
    return Sites(modules=modules, base=model.get_submodule(names.base), interface=names.interface)


# Attention of a decoder to its encoder stands beside its self-attention, under names like these.
_CROSS = re.compile(r"encoder_attn|cross_?attn|cross_?attention", re.IGNORECASE)


def _search(model: PreTrainedModel) -> _Names:
    named = dict(model.named_modules())
    attention = {
        n: m for n, m in named.items() if _looks_like_attention(m) and not _CROSS.search(n)
    }
    interface = {n: m for n, m in attention.items() if _uses_interface(m)}
    chosen = interface or {
        n: m for n, m in attention.items() if not any(o.startswith(f"{n}.") for o in attention)
    }
    if not chosen:
        raise ModelError(
            f"{type(model).__name__} has no attention layers that attnscope can see; "
            "models without attention (Mamba, RWKV …) have no attention to measure"
        )
    layers = {n: _layer(m, n) for n, m in chosen.items()}
    if len(set(layers.values())) < len(layers):  # towers beside the text: keep the text
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
        inside = set(decoder.modules()) if decoder is not None else set()
        layers = {n: layer for n, layer in layers.items() if named[n] in inside}
    if not layers or len(set(layers.values())) < len(layers):
        raise ModelError(
            f"{type(model).__name__} has more than one stack of attention layers "
            f"({', '.join(list(chosen)[:4])} …); watch the part you mean, for example "
            "watch(model.language_model)"
        )
    around = [
        n
        for n, m in named.items()
        if isinstance(m, PreTrainedModel) and all(f"{site}.".startswith(n) for site in layers)
    ]
    return _Names(layers=layers, base=max(around, key=len), interface=bool(interface))


def restrict(sites: Sites, layers: Any) -> frozenset[int]:
    """The layers to measure: all of them, or those asked for."""
    if layers is None:
        return frozenset(sites.layers)
    wanted = [layers] if isinstance(layers, int) else list(layers)
    for layer in wanted:
        if not isinstance(layer, int) or isinstance(layer, bool) or layer not in sites.layers:
            raise InputError(
                f"layer {layer!r} is not one that attends; this model's are "
                f"{_ranges(sites.layers)} (counted from 0)"
            )
    if not wanted:
        raise InputError("layers=[] leaves nothing to measure; leave it out to measure all layers")
    return frozenset(wanted)


def argument(module: nn.Module, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """An argument of a module's call, however it was passed; None where it was not."""
    if name in kwargs or not args:
        return kwargs.get(name)
    return inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments.get(name)


def _uses_interface(module: nn.Module) -> bool:
    """Whether a module's own code calls the attention interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _looks_like_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__ and "Cross" not in type(module).__name__


def _layer(module: nn.Module, name: str) -> int:
    """The index in the list of layers; modules carry it, or else their name does."""
    index = getattr(module, "layer_idx", None)
    if isinstance(index, int):
        return index
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.)", name)
    return int(numbers[0]) if numbers else 0


def _ranges(layers: list[int]) -> str:
    """0–27 rather than 0, 1, 2 …"""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
