"""Which tokens of a tokenizer stand for a part of a picture, a video or a sound.

Only a processor knows them for certain. `tokenizer_in` remembers them for the tokenizer of a
processor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal
from weakref import WeakKeyDictionary

from attnscope.errors import AttnscopeError, InputError

IMAGE_MARK = "<image>"
"""Stands for a picture in the prompts of an experiment, whatever the model's own token is."""
MODALITIES: tuple[Literal["image", "video", "audio"], ...] = ("image", "video", "audio")
Ids = Mapping[Any, frozenset[int]]
"""By modality: the ids of its tokens."""

_NAMES = re.compile(r"image|img|picture|vision|video|audio|sound|speech", re.IGNORECASE)
_known: WeakKeyDictionary[Any, Ids | AttnscopeError] = WeakKeyDictionary()


def tokenizer_in(processor: Any) -> Any:
    """The tokenizer of a processor; anything else is returned as it is."""
    tokenizer = getattr(processor, "tokenizer", None)
    if not hasattr(tokenizer, "get_vocab"):
        return processor
    _known[tokenizer] = {modality: _ids(processor, modality) for modality in MODALITIES}
    return tokenizer


def forget_modalities(tokenizer: Any, reason: AttnscopeError) -> None:
    """Remember that the processor of a tokenizer could not be loaded."""
    _known[tokenizer] = reason


def modality_ids(tokenizer: Any) -> Ids:
    """The ids of image, video and audio tokens; an error if they cannot be known."""
    known = _known.get(tokenizer)
    if isinstance(known, AttnscopeError):
        raise known
    if known is not None:
        return known
    names = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    named = [name for name in names if _NAMES.search(name)]
    if named:
        raise InputError(
            f"the tokenizer has the special token {named[0]!r}, but only the processor of the "
            "model says which tokens are parts of pictures, videos or sounds; give the processor "
            "in place of the tokenizer",
            code="needs-processor",
            token=named[0],
        )
    return dict.fromkeys(MODALITIES, frozenset())


def remembered_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of image, video and audio tokens; empty if they are unknown."""
    known = _known.get(tokenizer)
    return frozenset() if not isinstance(known, Mapping) else frozenset().union(*known.values())


def _ids(processor: Any, modality: str) -> frozenset[int]:
    several = getattr(processor, f"{modality}_token_ids", None)
    ids = several or [getattr(processor, f"{modality}_token_id", None)]
    return frozenset(int(id) for id in ids if id is not None)
