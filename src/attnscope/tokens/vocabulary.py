"""Decodes every token of a vocabulary to text.

A tokenizer writes its vocabulary in an encoding of its own: `Ġand` (byte-level BPE), `▁and` and
`<0x0A>` (SentencePiece), `##and` (WordPiece). `tokenizer.decode` of one token loses the space
before a word, so this module decodes each piece itself.

Three rules hold for every type of tokenizer:

* the space of a token is part of its text: `Ġand` and `▁and` become `" and"`;
* bytes that are not a complete UTF-8 character become U+FFFD, one or more of them. U+FFFD means
  "part of a character", and no rule over characters matches it;
* the text of a special token is empty.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PART_OF_A_CHARACTER = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The decoded text of every id, and which ids are special or were added after training."""

    texts: tuple[str, ...]
    """Text by id; empty for special tokens and for unused ids."""
    special: frozenset[int]
    """Ids of the special tokens (begin, end, padding, turn markers)."""
    added: frozenset[int]
    """Ids added to the vocabulary after training, including special ones."""
    fingerprint: str
    """A digest of the fields above; equal for equal vocabularies."""

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Number of characters of each text, by id."""
        return np.array([len(text) for text in self.texts], dtype=np.int64)


def require_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without character offsets, because regions need them."""
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"tokenizer {type(tokenizer).__name__} gives no character offsets, so attnscope cannot "
            "locate regions in its tokens; load a fast one, for instance with "
            "AutoTokenizer.from_pretrained(name), or convert it to a tokenizer.json",
            code="slow-tokenizer",
            tokenizer=type(tokenizer).__name__,
        )


# `add_tokens` can change a tokenizer after it was read, so each entry has the state it belongs to.
_read: WeakKeyDictionary[Any, tuple[tuple[int, ...], Vocabulary]] = WeakKeyDictionary()


def read_vocabulary(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """The vocabulary of a fast tokenizer, read once per tokenizer."""
    require_fast(tokenizer)
    state = (len(tokenizer), *sorted(_special_ids(tokenizer)))
    known = _read.get(tokenizer)
    if known is None or known[0] != state:
        known = (state, _read_vocabulary(tokenizer))
        _read[tokenizer] = known
    return known[1]


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    marked = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(tokenizer.all_special_ids)


def _read_vocabulary(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    pieces: dict[str, int] = tokenizer.get_vocab()
    if not pieces:
        raise InputError(
            "the tokenizer has an empty vocabulary: there are no tokens to classify",
            code="empty-vocabulary",
        )
    special = _special_ids(tokenizer)
    # Added tokens are matched in the raw text, so their content is not encoded.
    added = {id: token.content for id, token in tokenizer.added_tokens_decoder.items()}
    encoding = _encoding(tokenizer)
    texts = [""] * (max(pieces.values()) + 1)
    for piece, id in pieces.items():
        if id not in special:
            texts[id] = (
                added[id] if id in added else encoding.bytes_of(piece).decode(errors="replace")
            )
    digest = hashlib.sha256(json.dumps([texts, sorted(special), sorted(added)]).encode())
    return Vocabulary(
        texts=tuple(texts),
        special=frozenset(special),
        added=frozenset(added),
        fingerprint=digest.hexdigest(),
    )


@dataclass(frozen=True)
class _Encoding:
    """How a tokenizer writes the pieces of its vocabulary."""

    byte_level: bool
    """Each letter of a piece is one byte."""
    byte_fallback: bool
    """A piece such as `<0x0A>` is one byte."""
    marks: tuple[str, ...]
    """Signs for a space: SentencePiece's Metaspace, or a Replace that does the same."""
    prefix: str
    """The mark of a piece inside a word (WordPiece)."""
    suffix: str
    """The mark of a piece at the end of a word (CLIP)."""

    def bytes_of(self, piece: str) -> bytes:
        """The bytes of a piece, without the mark of its place in a word."""
        byte = _BYTE_PIECE.fullmatch(piece) if self.byte_fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        piece = piece.removeprefix(self.prefix).removesuffix(self.suffix)
        if self.byte_level:
            letters = _byte_of_letter()
            if all(letter in letters for letter in piece):
                return bytes(letters[letter] for letter in piece)
            return piece.encode()  # not encoded: a token that was added as plain text
        return self.with_spaces(piece).encode()

    def with_spaces(self, text: str) -> str:
        """The text with spaces in place of their marks."""
        for mark in self.marks:
            text = text.replace(mark, " ")
        return text


def _encoding(tokenizer: PreTrainedTokenizerBase) -> _Encoding:
    backend = tokenizer.backend_tokenizer
    steps = _steps(backend.decoder) + _steps(backend.pre_tokenizer)
    types = {step["type"] for step in steps}
    marks = [step["replacement"] for step in steps if step["type"] == "Metaspace"]
    marks += [
        step["pattern"]["String"]
        for step in steps
        if step["type"] == "Replace" and step["content"] == " " and "String" in step["pattern"]
    ]
    return _Encoding(
        byte_level="ByteLevel" in types,
        byte_fallback="ByteFallback" in types,
        marks=tuple(marks),
        prefix=getattr(backend.model, "continuing_subword_prefix", None) or "",
        suffix=getattr(backend.model, "end_of_word_suffix", None) or "",
    )


_bytes: WeakKeyDictionary[Any, tuple[tuple[int, ...], dict[int, bytes]]] = WeakKeyDictionary()
"""The bytes of the tokens that texts had so far, with the state of the tokenizer."""


def token_bytes(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """The bytes of each token of a text, with the spaces around words; together, the text.

    A special token has its name.
    """
    require_fast(tokenizer)
    state = (len(tokenizer), *sorted(_special_ids(tokenizer)))
    known = _bytes.get(tokenizer)
    if known is None or known[0] != state:
        known = _bytes[tokenizer] = (state, {})
    if new := sorted(set(ids) - known[1].keys()):
        known[1].update(zip(new, _token_bytes(new, tokenizer), strict=True))
    return [known[1][id] for id in ids]


def _token_bytes(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    encoding = _encoding(tokenizer)
    added = {id: token.content for id, token in tokenizer.added_tokens_decoder.items()}
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    read = []
    for id, piece in zip(ids, pieces, strict=True):
        if piece is None:  # an unused id
            read.append(b"")
            continue
        before = b" " if encoding.prefix and not piece.startswith(encoding.prefix) else b""
        after = b" " if encoding.suffix and piece.endswith(encoding.suffix) else b""
        text = added[id].encode() if id in added else encoding.bytes_of(piece)
        read.append(before + text + after)
    return read


def normalized(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text as `token_bytes` writes it: in the case and with the spaces of the tokenizer."""
    require_fast(tokenizer)
    if any(text == token.content for token in tokenizer.added_tokens_decoder.values()):
        return text
    encoding, backend = _encoding(tokenizer), tokenizer.backend_tokenizer
    written = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    if encoding.prefix or encoding.suffix:
        return " ".join(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(written))
    written = encoding.with_spaces(written)
    return written if text[:1].isspace() else written.lstrip(" ")


def _steps(component: Any) -> list[dict[str, Any]]:
    """A component of a tokenizer (its decoder, its pre-tokenizer) as a flat list of steps."""
    if component is None:
        return []
    try:
        state = json.loads(component.__getstate__())
    except Exception as error:  # a component written in Python has no readable state
        raise InputError(
            f"cannot read how this tokenizer encodes its vocabulary ({component!r}): {error}",
            code="unreadable-tokenizer",
            component=repr(component),
        ) from error
    flat: list[dict[str, Any]] = []
    pending = [state]
    while pending:
        step = pending.pop(0)
        inner = step.get("decoders") or step.get("pretokenizers") or []
        pending = [*inner, *pending]
        if not inner:
            flat.append(step)
    return flat


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """The byte of each letter: byte-level BPE writes every byte as one visible letter."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}
