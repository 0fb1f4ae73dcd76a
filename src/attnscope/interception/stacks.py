"""Groups the attention modules of a model into stacks of layers, and selects those of its text."""

import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attnscope.errors import ModelError
from attnscope.interception.families import MODALITY_TOWERS, POOLING_HEADS, SHARED_MODULES
from attnscope.interception.module_code import ATTENTION, INTERFACE, forward_names, method_names


def stacks_of(named: dict[str, nn.Module], attention: list[str]) -> dict[str, list[str]]:
    """List of layers → the names of its attention modules.

    These use the interface, or compute attention themselves and contain no such module.
    """
    stacks: dict[str, list[str]] = {}
    for name in attention:
        list_of_layers = re.split(r"(?:^|\.)\d+(?=\.|$)", name, maxsplit=1)[0]
        stacks.setdefault(list_of_layers, []).append(name)
    for prefix, names in stacks.items():
        selected = {name for name in names if INTERFACE in forward_names(named[name])}
        if len(selected) < len(names):
            inside = tuple(f"{name}." for name in selected)
            selected |= {
                name
                for name in names
                if (not inside or ATTENTION & method_names(named[name]))
                and not name.startswith(inside)
                and not any(other.startswith(f"{name}.") for other in attention)
            }
        stacks[prefix] = [name for name in names if name in selected]
    return {prefix: names for prefix, names in stacks.items() if names}


def text_stacks(model: PreTrainedModel, stacks: dict[str, list[str]]) -> dict[str, list[str]]:
    """The stacks without vision and audio towers."""
    if len(stacks) > 1:
        text = {p: names for p, names in stacks.items() if not MODALITY_TOWERS.search(p)}
        stacks = text or stacks
        text = {p: names for p, names in stacks.items() if not in_pooling_head(model, p)}
        stacks = text or stacks
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
        raise too_many_stacks(model, stacks)
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


def too_many_stacks(model: nn.Module, stacks: dict[str, list[str]]) -> ModelError:
    """The error for a model whose layers cannot be numbered; it names the parts that can."""
    names = [name for names in stacks.values() for name in names[:2]]
    parts = [
        part
        for part, module in model.named_modules()
        if part
        and isinstance(module, PreTrainedModel)
        and sum(any(n.startswith(f"{part}.") for n in names) for names in stacks.values()) == 1
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


def innermost_model(named: dict[str, nn.Module], inside: Iterable[str]) -> nn.Module:
    """The innermost PreTrainedModel that contains all modules of these names."""
    around = [
        name
        for name, module in named.items()
        if isinstance(module, PreTrainedModel)
        and all(not name or each.startswith(f"{name}.") for each in inside)
    ]
    return named[max(around, key=len)]


def stack_name(prefix: str, module: nn.Module) -> str:
    """The stack of a list of layers: "encoder" or "decoder"."""
    named = [part for part in prefix.split(".") if part in ("encoder", "decoder")]
    if named:
        return named[0]
    causal = getattr(module, "is_causal", getattr(module, "is_decoder", True))
    return "decoder" if causal else "encoder"
