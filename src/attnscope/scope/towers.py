"""Measures the parts of a model that read pictures or sound, beside the part that reads text."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import nn
from transformers import PreTrainedModel

from attnscope.errors import ModelError
from attnscope.interception.families import MODALITY_TOWERS
from attnscope.interception.sites import Sites, has_attention
from attnscope.scope.scope import Scope

WatchPart = Callable[[nn.Module], AbstractContextManager[Scope]]
SOUND = re.compile(r"audio|speech", re.IGNORECASE)
ENCODERS = {"text": "text_model", "vision": "vision_model", "audio": "audio_model"}


def dual_encoder(model: nn.Module) -> dict[str, nn.Module]:
    """The text and the vision or audio encoder of a model such as CLIP; empty for others.

    Such a model compares one vector of each encoder. Neither text nor picture is part of the other.
    """
    encoders = {
        part: encoder
        for part, name in ENCODERS.items()
        if isinstance(encoder := getattr(model, name, None), PreTrainedModel)
    }
    others = [
        part for part in model.children() if part not in encoders.values() and has_attention(part)
    ]
    return encoders if len(encoders) == 2 and "text" in encoders and not others else {}


def patch_size(model: nn.Module) -> int | None:
    """The side of a patch of a vision tower in pixels; None for other models."""
    size = getattr(getattr(model, "config", None), "patch_size", None)
    if isinstance(size, list | tuple) and len(set(size)) == 1:
        size = size[0]
    return size if isinstance(size, int) else None


def towers(sites: Sites) -> dict[str, nn.Module]:
    """The parts of a model whose attention layers are left out: "vision", "audio"."""
    parts: dict[str, nn.Module] = {}
    for prefix in sites.left_out:
        if not MODALITY_TOWERS.search(prefix):
            continue
        around = [
            (name, module)
            for name, module in sites.model.named_modules()
            if name
            and prefix.startswith(f"{name}.")
            and isinstance(module, PreTrainedModel)
            and MODALITY_TOWERS.search(name)
        ]
        if not around:
            raise ModelError(
                f"{prefix} of {type(sites.model).__name__} is not inside a PreTrainedModel of its "
                "own, so it cannot be measured",
                code="no-tower",
                module=prefix,
            )
        parts.setdefault("audio" if SOUND.search(prefix) else "vision", around[0][1])
    return parts


@contextmanager
def watch_together(parts: dict[str, nn.Module], watch_part: WatchPart) -> Iterator[Scope]:
    """Measure several models that run in one forward pass; the scope has one part for each."""
    with ExitStack() as stack:
        scopes = {name: stack.enter_context(watch_part(part)) for name, part in parts.items()}
        first = next(iter(scopes.values()))
        combined = Scope(layers=[], backend=first.backend, queries=first._queries, groups=0)
        for scope in (combined, *scopes.values()):
            scope._parts = scopes
        yield combined


@contextmanager
def watch_with_towers(
    text: AbstractContextManager[Scope], parts: dict[str, nn.Module], watch_part: WatchPart
) -> Iterator[Scope]:
    """Measure a model and its towers; the towers are further parts of the model's scope."""
    with ExitStack() as stack:
        scope = stack.enter_context(text)
        scopes = {name: stack.enter_context(watch_part(part)) for name, part in parts.items()}
        scope._parts = {**scope._parts, **scopes}
        scope._left_out = ()
        yield scope
