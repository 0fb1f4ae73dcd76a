"""Compare two views: align their tokens and fit the factor by which attention changed.

Two variants of one prompt are aligned by the token ids that the insertion kept. One text read by
two models is aligned by character offsets. Two texts are aligned by their common runs of tokens.
"""

from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from attnscope.measures.slope import slope
from attnscope.measures.uniformity import uniformity
from attnscope.web.views import Float32s, View

MATCHED = 3_000
"""The most tokens to search for common runs; longer texts share only their start and end."""
KEPT = 8
"""Alignments that are cached, one for each pair of views."""

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Aligned:
    """The tokens that two views share."""

    a: Indices
    b: Indices
    """`b[n]` is the position aligned with `a[n]`; both ascend."""
    unaligned_a: int
    unaligned_b: int
    """Tokens without an aligned position, filler excluded: boundaries and differences."""


class Alignments:
    """A cache of alignments by the ids of two views, so that a zoom does not align again."""

    def __init__(self) -> None:
        self._by_ids: dict[tuple[str, str], Aligned] = {}

    def of(self, a: View, b: View) -> Aligned:
        """The aligned tokens of two views; new layers do not change them."""
        aligned = self._by_ids.get((a.id, b.id))
        if aligned is None:
            aligned = align(a, b)
            self._by_ids = dict([*self._by_ids.items(), ((a.id, b.id), aligned)][-KEPT:])
        return aligned


def align(a: View, b: View) -> Aligned:
    """Align the tokens of two views."""
    of_a, of_b = _by_base(a), _by_base(b)
    if _same_base(a, b):
        pairs = [(of_a[n], of_b[n]) for n in sorted(of_a.keys() & of_b.keys())]
    elif a.request.filler is None and b.request.filler is None and _text(a) == _text(b):
        at = {offset: n for n, offset in enumerate(_offsets(a))}
        pairs = [(at[offset], n) for n, offset in enumerate(_offsets(b)) if offset in at]
    else:
        pairs = _common_runs(a.tokens[: a.prompt], b.tokens[: b.prompt])
        filler_a, filler_b = set(a.filler), set(b.filler)
        pairs = [(m, n) for m, n in pairs if m not in filler_a and n not in filler_b]
    aligned = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return Aligned(
        aligned[:, 0],
        aligned[:, 1],
        unaligned_a=a.prompt - len(a.filler) - len(aligned),
        unaligned_b=b.prompt - len(b.filler) - len(aligned),
    )


def _by_base(view: View) -> dict[int, int]:
    """Position in the prompt without filler → position in this view."""
    positions = view.aligned_positions
    positions = positions if positions is not None else list(range(view.prompt))
    return {base: n for n, base in enumerate(positions) if base >= 0}


def _same_base(a: View, b: View) -> bool:
    """Whether two views differ in their fillers only."""
    same = ("text", "chat", "system")
    return a.model == b.model and all(
        getattr(a.request, name) == getattr(b.request, name) for name in same
    )


def _text(view: View) -> str:
    return "".join(view.tokens[: view.prompt])


def _offsets(view: View) -> list[tuple[int, str]]:
    """The character offset and the text of every token of the prompt."""
    texts = view.tokens[: view.prompt]
    starts = [0, *accumulate(len(text) for text in texts)]
    return list(zip(starts, texts, strict=False))


def _common_runs(a: list[str], b: list[str]) -> list[tuple[int, int]]:
    """The common start and end of two texts, and the common runs between them."""
    most = min(len(a), len(b))
    head = next((n for n in range(most) if a[n] != b[n]), most)
    rest = most - head
    tail = next((n for n in range(rest) if a[-1 - n] != b[-1 - n]), rest)
    pairs = [(n, n) for n in range(head)]
    inner_a, inner_b = a[head : len(a) - tail], b[head : len(b) - tail]
    if max(len(inner_a), len(inner_b)) <= MATCHED:
        matched = SequenceMatcher(None, inner_a, inner_b, autojunk=False).get_matching_blocks()
        pairs += [(head + run.a + n, head + run.b + n) for run in matched for n in range(run.size)]
    return pairs + [(len(a) - tail + n, len(b) - tail + n) for n in range(tail)]


def numbers(a: View, b: View, aligned: Aligned, layer: int, head: int | None) -> dict[str, float]:
    """λ of b on a, λ under uniform attention, and the uniformity of the fillers."""
    of_a, of_b = (view.shade("average", "all", layer, head) for view in (a, b))
    uniform = [view.uniform_average[view.index_of(layer)] for view in (a, b)]
    every = np.ones(len(aligned.a), dtype=bool)
    factor, ratio, fit, size = slope(
        of_a[aligned.a].astype(np.float64), of_b[aligned.b].astype(np.float64), every
    )
    expected, *_ = slope(
        uniform[0][aligned.a].astype(np.float64), uniform[1][aligned.b].astype(np.float64), every
    )
    result = {
        "lambda": float(factor),
        "lambda_ratio": float(ratio),
        "lambda_r2": float(fit),
        "uniform_slope": float(expected),
        "tokens": float(size),
    }
    for side, view, values in (("a", a, of_a), ("b", b, of_b)):
        if view.filler:
            result[f"uniformity_{side}"] = _uniformity(values, view.filler)
    return result


def _uniformity(values: Float32s, filler: list[int]) -> float:
    inside = np.zeros(len(values), dtype=bool)
    inside[filler] = True
    return float(uniformity(values.astype(np.float64), inside)[0])
