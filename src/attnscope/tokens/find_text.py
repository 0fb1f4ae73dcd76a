"""Finds words in token ids, and keeps the tokenizer that belongs to a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import InputError
from attnscope.tokens.modalities import tokenizer_in
from attnscope.tokens.vocabulary import normalized, token_bytes
from attnscope.tokens.whole_words import WholeWords

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_tokenizers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def remember_tokenizer(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Remember the tokenizer that a model was loaded with."""
    _tokenizers[model] = tokenizer


def tokenizer_of(model: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer that `attnscope.load` returned with a model; None for other models."""
    return _tokenizers.get(model)


def check_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer, also that of a processor; an error if there is none."""
    if tokenizer is None:
        raise InputError(
            "this needs the tokenizer of the model, and the model does not come from "
            "attnscope.load; give it as tokenizer=…",
            code="needs-tokenizer",
        )
    return tokenizer_in(tokenizer)


def find_tokens(
    ids: NDArray[np.int64], real: NDArray[np.bool_], tokenizer: Any, text: str
) -> NDArray[np.bool_]:
    """[B, K] True for the tokens that contain `text`, in every place that has it as whole words.

    `ids` [B, K] are token ids, and `real` is False at padding. A sequence without the text is an
    error.
    """
    written = normalized(text, tokenizer)
    words = WholeWords([written])
    marked = np.zeros(ids.shape, dtype=bool)
    for n, row in enumerate(ids):
        columns = np.flatnonzero(real[n])
        pieces = token_bytes(row[columns].tolist(), tokenizer)
        marked[n, columns] = words.in_tokens(pieces)
        if not marked[n].any():
            read = b"".join(pieces).decode(errors="replace")
            inside = " as whole words, only inside others" if written and written in read else ""
            raise InputError(
                f"sequence {n} does not have {text!r:.80}{inside}; its text is {read!r:.120}",
                code="text-not-found",
                text=text,
                sequence=n,
            )
    return marked
