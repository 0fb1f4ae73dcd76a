"""Aligns the tokens of a base prompt with those of a variant that has an insertion or a change.

Aligned tokens have the same id and the same position in the text, apart from the inserted span.
Tokens that the insertion changed are boundary tokens. Every token of both prompts is counted
exactly once.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.tokens.regions import Region
from attnscope.tokens.tokenized import TokenizedPrompt

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Alignment:
    """Which token of the base is which token of the variant. Token indices, without padding."""

    base: Indices
    """Base tokens that are aligned with a variant token, in order."""
    variant: Indices
    """The variant tokens of `base`: `variant[n]` is aligned with `base[n]`."""
    filler: Indices
    """Variant tokens wholly inside the inserted span."""
    base_boundary: Indices
    """Base tokens that are not aligned: the insertion changed them."""
    variant_boundary: Indices
    """Variant tokens that are neither aligned nor wholly inside the inserted span."""


def align(
    base: TokenizedPrompt, variant: TokenizedPrompt, inserted: Region, filler: Region
) -> Alignment:
    """Align two prompts whose texts differ by the span `inserted` of the variant.

    `filler` is the part of the span that counts as filler: the span without its separators.
    Tokens are aligned from both ends inwards until ids or positions differ.
    """
    at, length = inserted.start, inserted.end - inserted.start
    before = (base.offsets[:, 1] <= at) & _same(base, variant, 0, from_end=False)
    prefix = _leading_true(before)
    empty = base.offsets[:, 0] == base.offsets[:, 1]
    after = ((base.offsets[:, 0] >= at) | empty) & _same(base, variant, length, from_end=True)
    suffix = min(_leading_true(after[::-1]), len(base) - prefix, len(variant) - prefix)

    middle = np.arange(prefix, len(variant) - suffix)
    start, end = variant.offsets[middle, 0], variant.offsets[middle, 1]
    inside = (start >= filler.start) & (end <= filler.end) & (start < end)
    alignment = Alignment(
        base=_both_ends(prefix, suffix, len(base)),
        variant=_both_ends(prefix, suffix, len(variant)),
        filler=middle[inside],
        base_boundary=np.arange(prefix, len(base) - suffix),
        variant_boundary=middle[~inside],
    )
    _check(alignment, base, variant)
    return alignment


def align_by(base: TokenizedPrompt, variant: TokenizedPrompt, places: Indices) -> Alignment:
    """Align two prompts by `places`: the index in the variant of each character of the base, or -1.

    Aligned tokens have the same id and the same characters; all others are boundary tokens.
    """
    variant_index = {key: n for n, key in enumerate(_keys(variant, variant.offsets))}
    start, end = base.offsets[:, 0], base.offsets[:, 1]
    written = start < end
    moved = np.full_like(base.offsets, -1)
    moved[written, 0] = places[start[written]]
    moved[written, 1] = places[end[written] - 1] + 1
    unbroken = [
        not has_text or bool((np.diff(places[a:b]) == 1).all() and places[a] >= 0)
        for has_text, a, b in zip(written, start, end, strict=True)
    ]
    pairs = [
        (n, variant_index[key])
        for n, key in enumerate(_keys(base, moved))
        if unbroken[n] and key in variant_index and (written[n] or n == variant_index[key] == 0)
    ]
    aligned = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    alignment = Alignment(
        base=aligned[:, 0],
        variant=aligned[:, 1],
        filler=np.arange(0),
        base_boundary=np.setdiff1d(np.arange(len(base)), aligned[:, 0]),
        variant_boundary=np.setdiff1d(np.arange(len(variant)), aligned[:, 1]),
    )
    _check(alignment, base, variant)
    return alignment


def _keys(tokens: TokenizedPrompt, offsets: Indices) -> list[tuple[int, int, int, int]]:
    """Id and offsets of every token, with a number that separates the bytes of one character."""
    counts: dict[tuple[int, int], int] = {}
    keys = []
    for id, (start, end) in zip(tokens.ids.tolist(), offsets.tolist(), strict=True):
        order = counts[start, end] = counts.get((start, end), -1) + 1
        unwritten = start >= end or start < 0
        keys.append((id, -1, -1, order) if unwritten else (id, start, end, order))
    return keys


def _same(
    base: TokenizedPrompt, variant: TokenizedPrompt, shift: int, *, from_end: bool
) -> NDArray[np.bool_]:
    """[K of base] True where the token counted from one end has the same id and offsets."""
    shared = min(len(base), len(variant))
    here = slice(len(base) - shared, None) if from_end else slice(shared)
    other = slice(len(variant) - shared, None) if from_end else slice(shared)
    # A token without text (a begin or end that the tokenizer added) has no offsets to compare.
    moved = base.offsets[here] + shift
    unwritten = (base.offsets[here, 0] == base.offsets[here, 1]) & (
        variant.offsets[other, 0] == variant.offsets[other, 1]
    )
    same = np.zeros(len(base), dtype=bool)
    same[here] = (base.ids[here] == variant.ids[other]) & (
        unwritten | (moved == variant.offsets[other]).all(axis=1)
    )
    return same


def _leading_true(flags: NDArray[np.bool_]) -> int:
    """Number of flags before the first False."""
    return len(flags) if flags.all() else int(flags.argmin())


def _both_ends(prefix: int, suffix: int, length: int) -> Indices:
    return np.concatenate([np.arange(prefix), np.arange(length - suffix, length)])


def _check(alignment: Alignment, base: TokenizedPrompt, variant: TokenizedPrompt) -> None:
    """Raise an error unless aligned tokens have equal ids and every token is counted once."""
    same_ids = np.array_equal(base.ids[alignment.base], variant.ids[alignment.variant])
    counted_base = np.sort(np.concatenate([alignment.base, alignment.base_boundary]))
    counted_variant = np.sort(
        np.concatenate([alignment.variant, alignment.filler, alignment.variant_boundary])
    )
    complete = np.array_equal(counted_base, np.arange(len(base))) and np.array_equal(
        counted_variant, np.arange(len(variant))
    )
    if not (same_ids and complete):
        raise AttnscopeError(
            "an alignment lost a token or paired two different ones. This is a bug of attnscope; "
            f"please report it with this prompt: {variant.prompt.text[:200]!r}",
            code="bad-alignment",
            text=variant.prompt.text,
        )
