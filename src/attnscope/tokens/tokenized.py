"""Tokenizes prompts and maps their regions from characters to tokens.

A token belongs to a region if it contains at least one character of the region; a token across
the border of two regions belongs to both. Padding belongs to none. The mapping uses the character
offsets of fast tokenizers; a tokenizer without offsets is refused.

Shapes: K = tokens of one prompt, B = prompts of a batch, N = columns of a padded batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import InputError, unknown
from attnscope.tokens.regions import Prompt, Region
from attnscope.tokens.vocabulary import Vocabulary, read_vocabulary, require_fast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Mask = NDArray[np.bool_]
Side = Literal["left", "right"]
_SIDES = ("left", "right")


@dataclass(frozen=True, eq=False)
class TokenizedPrompt:
    """A prompt and its tokens."""

    prompt: Prompt
    ids: NDArray[np.int64]
    """[K] token ids."""
    offsets: NDArray[np.int64]
    """[K, 2] start and end (exclusive) in characters; an empty span for a token without text in
    the prompt, such as a begin-of-sequence token that the tokenizer added."""

    def __len__(self) -> int:
        return len(self.ids)

    def mask(self, name: str) -> NDArray[np.bool_]:
        """[K] True for the tokens that contain a character of the region."""
        start, end = self.offsets[:, 0], self.offsets[:, 1]
        inside = np.zeros(len(self), dtype=bool)
        for region in self.prompt.spans(name):
            held = np.minimum(end, region.end) - np.maximum(start, region.start)
            inside |= held > 0
        return inside

    @property
    def lost(self) -> tuple[str, ...]:
        """Regions with text but without a token: truncation removed them."""
        written = {region.name: region.end > region.start for region in self.prompt.regions}
        return tuple(name for name in written if written[name] and not self.mask(name).any())


def tokenize(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, *, max_length: int | None = None
) -> TokenizedPrompt:
    """Tokenize a prompt and keep the character offsets of its tokens.

    `max_length` truncates on the side of `tokenizer.truncation_side`; the property `lost` names
    the regions that were removed.
    """
    require_fast(tokenizer)
    if max_length is not None and max_length < 1:
        raise InputError(
            f"max_length is {max_length}; it must be at least 1 token",
            code="bad-max-length",
            max_length=max_length,
        )
    encoded = tokenizer(
        prompt.text,
        add_special_tokens=not prompt.complete,
        return_offsets_mapping=True,
        truncation=max_length is not None,
        max_length=max_length,
    )
    vocabulary = read_vocabulary(tokenizer)
    ids, places = encoded["input_ids"], encoded["offset_mapping"]
    return next(_tokenized([prompt], [ids], [places], vocabulary))


def tokenize_all(
    prompts: Iterable[Prompt], tokenizer: PreTrainedTokenizerBase
) -> Iterator[TokenizedPrompt]:
    """Tokenize many prompts, in order, in half the time of one by one.

    The tokenizer runs in a second thread while the iterator `prompts` makes the next ones.
    """
    require_fast(tokenizer)
    vocabulary = read_vocabulary(tokenizer)
    coming = iter(prompts)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="attnscope-tokenizer") as thread:
        some = list(islice(coming, _BATCH))
        while some:
            encoding = thread.submit(_encoded, some, tokenizer)
            following = list(islice(coming, _BATCH))
            tokenized = {
                complete: _tokenized(*encoded, vocabulary)
                for complete, encoded in encoding.result().items()
            }
            for prompt in some:
                yield next(tokenized[prompt.complete])
            some = following


_Encoded = tuple[list[Prompt], list[list[int]], list[list[tuple[int, int]]]]
"""Prompts, their ids, and the offsets of the ids."""


def _encoded(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> dict[bool, _Encoded]:
    """Encode complete and other prompts separately: one call adds special tokens to all or none."""
    groups = {}
    for complete in (False, True):
        group = [prompt for prompt in prompts if prompt.complete == complete]
        if group:
            encoded = tokenizer(
                [prompt.text for prompt in group],
                add_special_tokens=not complete,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
            )
            groups[complete] = group, encoded["input_ids"], encoded["offset_mapping"]
    return groups


_BATCH = 512  # prompts; larger batches need more memory and save no time


def _tokenized(
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    places: Sequence[Sequence[tuple[int, int]]],
    vocabulary: Vocabulary,
) -> Iterator[TokenizedPrompt]:
    """Combine prompts, ids and offsets; repair the offsets of the few prompts that need it."""
    ends = np.cumsum([0, *map(len, ids)])
    total = int(ends[-1])
    flat = np.fromiter(chain.from_iterable(ids), np.int64, total)
    spans = np.fromiter(chain.from_iterable(chain.from_iterable(places)), np.int64, 2 * total)
    spans = spans.reshape(-1, 2)
    held = spans[:, 1] - spans[:, 0]
    wrong = vocabulary.lengths[flat] > held
    wrong[1:] |= (spans[1:] == spans[:-1]).all(axis=1) & (held[1:] > 1)
    so_far = np.concatenate([[0], np.cumsum(wrong)])
    for prompt, start, end in zip(prompts, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        if start == end:
            raise InputError(
                f"the tokenizer makes no tokens of this prompt: {prompt.text[:80]!r}",
                code="no-tokens",
                text=prompt.text,
            )
        of_prompt, offsets = flat[start:end], spans[start:end]
        if so_far[end] > so_far[start]:
            _divide_runs_of_bytes(prompt.text, offsets)
            _restore_spaces(prompt.text, of_prompt, offsets, vocabulary)
        yield TokenizedPrompt(prompt, of_prompt, offsets)


def _divide_runs_of_bytes(text: str, offsets: NDArray[np.int64]) -> None:
    """Give each byte of a run of unknown characters the offsets of its own character.

    SentencePiece models report the whole run for every byte in it. A line break before a rare
    character would then belong to both sides of a border.
    """
    start, end = offsets[:, 0], offsets[:, 1]
    repeats = np.flatnonzero((offsets[1:] == offsets[:-1]).all(axis=1) & (end - start > 1)[1:])
    for first in repeats.tolist():
        span = text[start[first] : end[first]]
        letters = np.repeat(np.arange(len(span)), [len(letter.encode()) for letter in span])
        run = slice(first, first + len(letters))
        if (offsets[run] == offsets[first]).all() and len(offsets[run]) == len(letters):
            offsets[run, 0] = start[first] + letters
            offsets[run, 1] = offsets[run, 0] + 1


def _restore_spaces(
    text: str, ids: NDArray[np.int64], offsets: NDArray[np.int64], vocabulary: Vocabulary
) -> None:
    """Add the spaces that the offsets of tokens leave out.

    Byte-level tokenizers with `trim_offsets` report `" the"` without its space, and a token of
    spaces as an empty span. Whitespace would then belong to no region.
    """
    short = vocabulary.lengths[ids] > offsets[:, 1] - offsets[:, 0]
    for n in np.flatnonzero(short).tolist():
        start, end = int(offsets[n, 0]), int(offsets[n, 1])
        decoded = vocabulary.texts[int(ids[n])]
        missing = len(decoded) - (end - start)
        leading = len(decoded) - len(decoded.lstrip())
        taken = int(offsets[n - 1, 1]) if n else 0
        while missing and leading and start > taken and text[start - 1].isspace():
            start, missing, leading = start - 1, missing - 1, leading - 1
        trailing = len(decoded) - len(decoded.rstrip())
        until = int(offsets[n + 1, 0]) if n + 1 < len(ids) else len(text)
        while missing and trailing and end < until and text[end].isspace():
            end, missing, trailing = end + 1, missing - 1, trailing - 1
        offsets[n] = start, end


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Tokenized prompts as one padded array."""

    rows: tuple[TokenizedPrompt, ...]
    input_ids: NDArray[np.int64]
    """[B, N]"""
    attention_mask: NDArray[np.int64]
    """[B, N] 1 for real tokens, 0 for padding."""

    @cached_property
    def real(self) -> Mask:
        """[B, N] the attention mask as bool."""
        return self.attention_mask.astype(bool)

    def mask(self, name: str, *, some: bool = False) -> Mask:
        """[B, N] True for the tokens of the region; padding is never part of it.

        With `some`, prompts may lack the region; otherwise that is an error.
        """
        inside = np.zeros_like(self.real)
        for row, tokens in enumerate(self.rows):
            if not some or name in tokens.prompt.names:
                inside[row, self.columns(row)] = tokens.mask(name)
        return inside

    def columns(self, row: int) -> slice:
        """The columns of a row that hold the tokens of its prompt."""
        first = int(self.attention_mask[row].argmax())
        return slice(first, first + len(self.rows[row]))

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """The arguments of `model(**batch.inputs)`: torch tensors on the CPU."""
        import torch  # here, so that the module works without torch

        return {
            "input_ids": torch.from_numpy(self.input_ids),
            "attention_mask": torch.from_numpy(self.attention_mask),
        }


def pad(
    rows: Iterable[TokenizedPrompt],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    side: Side | None = None,
) -> PaddedBatch:
    """Pad tokenized prompts on `side` (default: `tokenizer.padding_side`).

    The tokenizer needs no padding token, because padding is masked.
    """
    rows = tuple(rows)
    if not rows:
        raise InputError("a batch needs at least one prompt", code="empty-batch")
    side = side or getattr(tokenizer, "padding_side", "right")
    if side not in _SIDES:
        raise unknown("padding side", side, _SIDES)
    filling = getattr(tokenizer, "pad_token_id", None)
    width = max(map(len, rows))
    input_ids = np.full((len(rows), width), filling if filling is not None else 0, dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    for n, row in enumerate(rows):
        columns = slice(width - len(row), width) if side == "left" else slice(len(row))
        input_ids[n, columns] = row.ids
        attention_mask[n, columns] = 1
    return PaddedBatch(rows, input_ids, attention_mask)


def prompt_from_ids(
    ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    first: Sequence[int] = (),
    regions: Mapping[str, int] | None = None,
) -> TokenizedPrompt:
    """A tokenized prompt from token ids, with the decoded tokens as its text.

    A token without text is written as its name. `first` are tokens without text before the
    prompt. `regions` gives consecutive regions with their numbers of tokens.
    """
    decoded = read_vocabulary(tokenizer).texts
    names = tokenizer.convert_ids_to_tokens(list(ids))
    texts = [decoded[id] or name for id, name in zip(ids, names, strict=True)]
    ends = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    counts = np.cumsum([0, *(regions or {}).values()])
    spans = [
        Region(int(ends[counts[n]]), int(ends[counts[n + 1]]), name)
        for n, name in enumerate(regions or {})
    ]
    empty = np.zeros((len(first), 2), dtype=np.int64)
    return TokenizedPrompt(
        Prompt("".join(texts), tuple(spans)),
        np.array([*first, *ids], dtype=np.int64),
        np.concatenate([empty, np.stack([ends[:-1], ends[1:]], axis=1)]),
    )
