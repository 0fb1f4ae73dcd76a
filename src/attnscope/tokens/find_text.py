"""Finds words in a text and in token ids; and keeps the tokenizer that belongs to a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import regex
from numpy.typing import NDArray

from attnscope.errors import InputError
from attnscope.tokens.vocabulary import normalized, token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A letter or digit of a script that separates words by spaces; other scripts have no word edges.
_IN_A_WORD = r"[\w--[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]]"

_tokenizers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def remember_tokenizer(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Remember the tokenizer that a model was loaded with."""
    _tokenizers[model] = tokenizer


def tokenizer_of(model: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer that `attnscope.load` returned with a model; None for other models."""
    return _tokenizers.get(model)


def check_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer; an error if there is none."""
    if tokenizer is None:
        raise InputError(
            "this needs the tokenizer of the model, and the model does not come from "
            "attnscope.load; give it as tokenizer=…",
            code="needs-tokenizer",
        )
    return tokenizer


def places(text: str, words: str) -> list[int]:
    """Where the text has these words as whole words: "know" does not have "now"."""
    before, after = (
        f"(?{side}{_IN_A_WORD})" if regex.match(_IN_A_WORD, edge, regex.V1) else ""
        for side, edge in (("<!", words[:1]), ("!", words[-1:]))
    )
    pattern = f"{before}{regex.escape(words)}{after}"
    return [match.start() for match in regex.finditer(pattern, text, regex.V1)] if words else []


def find_tokens(
    ids: NDArray[np.int64], real: NDArray[np.bool_], tokenizer: Any, text: str
) -> NDArray[np.bool_]:
    """[B, K] True for the tokens that contain `text`, in every place that has it as whole words.

    `ids` [B, K] are token ids, and `real` is False at padding. A sequence without the text is an
    error.
    """
    words = normalized(text, tokenizer)
    marked = np.zeros(ids.shape, dtype=bool)
    for n, row in enumerate(ids):
        columns = np.flatnonzero(real[n])
        marked[n, columns] = _containing(token_bytes(row[columns].tolist(), tokenizer), words)
        if not marked[n].any():
            read = b"".join(token_bytes(row[columns].tolist(), tokenizer)).decode(errors="replace")
            inside = " as whole words, only inside others" if words and words in read else ""
            raise InputError(
                f"sequence {n} does not have {text!r:.80}{inside}; its text is {read!r:.120}",
                code="text-not-found",
                text=text,
                sequence=n,
            )
    return marked


def _containing(pieces: Sequence[bytes], words: str) -> NDArray[np.bool_]:
    """[K] True for the pieces that hold at least one byte of these words."""
    # A byte that is not part of a complete character becomes one surrogate, so bytes can be counted
    text = b"".join(pieces).decode(errors="surrogateescape")
    ends = np.cumsum([0, *map(len, pieces)])
    marked = np.zeros(len(pieces), dtype=bool)
    for character in places(text, words):
        start = len(text[:character].encode(errors="surrogateescape"))
        end = start + len(words.encode())
        marked |= (ends[:-1] < end) & (ends[1:] > start)
    return marked
