"""The twins of a base prompt's tokens in a variant: with something inserted, or changed.

The proof is by ids: twins have the same id and the same place in the text, the inserted span
aside. What the insertion changed at its edges is a seam, on either side; seams are reported, and
every token of both prompts is accounted for exactly once.

This module must not know what was inserted or why.
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
    """Base tokens that have a twin, in order."""
    variant: Indices
    """Their twins: `variant[n]` is the twin of `base[n]`."""
    filler: Indices
    """Variant tokens wholly inside the inserted span."""
    base_boundary: Indices
    """Base tokens without a twin: the insertion changed them."""
    variant_boundary: Indices
    """Variant tokens that are neither twins nor wholly inserted."""


def align(
    base: TokenizedPrompt, variant: TokenizedPrompt, inserted: Region, filler: Region
) -> Alignment:
    """Align two prompts whose texts differ by the span `inserted` of the variant.

    `filler` is the part of the span that counts as filler: the span itself, or less, where it
    was set off by separators. Twins run from both ends inwards until ids or places differ.
    """
    at, length = inserted.start, inserted.end - inserted.start
    before = (base.offsets[:, 1] <= at) & _same(base, variant, 0, from_end=False)
    prefix = _run(before)
    empty = base.offsets[:, 0] == base.offsets[:, 1]
    after = ((base.offsets[:, 0] >= at) | empty) & _same(base, variant, length, from_end=True)
    suffix = min(_run(after[::-1]), len(base) - prefix, len(variant) - prefix)

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
    _prove(alignment, base, variant)
    return alignment


def align_by(base: TokenizedPrompt, variant: TokenizedPrompt, places: Indices) -> Alignment:
    """Align two prompts by `places`: where the variant has each character of the base, -1 for
    nowhere. Twins have the same id, and every character in its place; all others are seams."""
    there = {key: n for n, key in enumerate(_keys(variant, variant.offsets))}
    start, end = base.offsets[:, 0], base.offsets[:, 1]
    written = start < end
    moved = np.full_like(base.offsets, -1)
    moved[written, 0] = places[start[written]]
    moved[written, 1] = places[end[written] - 1] + 1
    whole = [
        not said or bool((np.diff(places[a:b]) == 1).all() and places[a] >= 0)
        for said, a, b in zip(written, start, end, strict=True)
    ]
    pairs = [
        (n, there[key])
        for n, key in enumerate(_keys(base, moved))
        if whole[n] and key in there and (written[n] or n == there[key] == 0)
    ]
    twins = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    alignment = Alignment(
        base=twins[:, 0],
        variant=twins[:, 1],
        filler=np.arange(0),
        base_boundary=np.setdiff1d(np.arange(len(base)), twins[:, 0]),
        variant_boundary=np.setdiff1d(np.arange(len(variant)), twins[:, 1]),
    )
    _prove(alignment, base, variant)
    return alignment


def _keys(tokens: TokenizedPrompt, offsets: Indices) -> list[tuple[int, int, int, int]]:
    """Id and place of every token; the bytes of one character are told apart by their order."""
    seen: dict[tuple[int, int], int] = {}
    keys = []
    for id, (start, end) in zip(tokens.ids.tolist(), offsets.tolist(), strict=True):
        order = seen[start, end] = seen.get((start, end), -1) + 1
        unwritten = start >= end or start < 0
        keys.append((id, -1, -1, order) if unwritten else (id, start, end, order))
    return keys


def _same(
    base: TokenizedPrompt, variant: TokenizedPrompt, shift: int, *, from_end: bool
) -> NDArray[np.bool_]:
    """[K of base] True where the token counted from one end has the same id and place."""
    shared = min(len(base), len(variant))
    here = slice(len(base) - shared, None) if from_end else slice(shared)
    there = slice(len(variant) - shared, None) if from_end else slice(shared)
    # A token without text (a begin or end the tokenizer added) has no place to compare.
    moved = base.offsets[here] + shift
    unwritten = (base.offsets[here, 0] == base.offsets[here, 1]) & (
        variant.offsets[there, 0] == variant.offsets[there, 1]
    )
    same = np.zeros(len(base), dtype=bool)
    same[here] = (base.ids[here] == variant.ids[there]) & (
        unwritten | (moved == variant.offsets[there]).all(axis=1)
    )
    return same


def _run(flags: NDArray[np.bool_]) -> int:
    """How many flags are True before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())


def _both_ends(prefix: int, suffix: int, length: int) -> Indices:
    return np.concatenate([np.arange(prefix), np.arange(length - suffix, length)])


def _prove(alignment: Alignment, base: TokenizedPrompt, variant: TokenizedPrompt) -> None:
    twins = np.array_equal(base.ids[alignment.base], variant.ids[alignment.variant])
    counted_base = np.sort(np.concatenate([alignment.base, alignment.base_boundary]))
    counted_variant = np.sort(
        np.concatenate([alignment.variant, alignment.filler, alignment.variant_boundary])
    )
    complete = np.array_equal(counted_base, np.arange(len(base))) and np.array_equal(
        counted_variant, np.arange(len(variant))
    )
    if not (twins and complete):
        raise AttnscopeError(
            "an alignment lost a token or paired two different ones. This is a bug of attnscope; "
            f"please report it with this prompt: {variant.prompt.text[:200]!r}",
            code="bad-alignment",
            text=variant.prompt.text,
        )
