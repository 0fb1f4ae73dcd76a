"""Compare two views: align their tokens and fit the factor by which attention changed.

Two variants of one prompt are aligned by the token ids that the insertion kept. One text read by
two models is aligned by character offsets. Two texts are aligned by their common runs of tokens.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from attnscope.measures.slope import slope
from attnscope.measures.uniformity import uniformity
from attnscope.web.views import Float32s, View

MATCHED = 3_000
"""The most tokens of two texts, without common start and end, that are matched token by token."""
ANCHOR, GAP = 8, 300
"""Longer texts are aligned at runs of ANCHOR tokens that both have once. Between two such runs, up
to GAP tokens are matched token by token."""
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
    inner_a, inner_b = a[head : len(a) - tail], b[head : len(b) - tail]
    short = max(len(inner_a), len(inner_b)) <= MATCHED
    inner = _matched(inner_a, inner_b) if short else _between_anchors(inner_a, inner_b)
    return [
        *((n, n) for n in range(head)),
        *((head + m, head + n) for m, n in inner),
        *((len(a) - tail + n, len(b) - tail + n) for n in range(tail)),
    ]


def _matched(a: list[str], b: list[str]) -> list[tuple[int, int]]:
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return [(block.a + n, block.b + n) for block in blocks for n in range(block.size)]


def _between_anchors(a: list[str], b: list[str]) -> list[tuple[int, int]]:
    """The anchors in the order of both texts, and the tokens that match between them."""
    pairs: list[tuple[int, int]] = []
    before_a = before_b = 0
    for at_a, at_b in [*_anchors(a, b), (len(a), len(b))]:
        gap_a, gap_b = a[before_a:at_a], b[before_b:at_b]
        if gap_a and gap_b and max(len(gap_a), len(gap_b)) <= GAP:
            pairs += [(before_a + m, before_b + n) for m, n in _matched(gap_a, gap_b)]
        if at_a < len(a):
            pairs.append((at_a, at_b))
        before_a, before_b = at_a + 1, at_b + 1
    return pairs


def _anchors(a: list[str], b: list[str]) -> list[tuple[int, int]]:
    """Starts of runs that both texts have once: the most that are in the same order in both."""
    starts_a, starts_b = _single_runs(a), _single_runs(b)
    common = [(at, starts_b[run]) for run, at in starts_a.items() if run in starts_b]
    # The longest increasing subsequence: `ends[n]` is the smallest end of one of n + 1 anchors.
    ends: list[int] = []
    chain: list[int] = []
    previous = [-1] * len(common)
    for n, (_, at) in enumerate(common):
        length = bisect_left(ends, at)
        previous[n] = chain[length - 1] if length else -1
        ends[length : length + 1] = [at]
        chain[length : length + 1] = [n]
    anchors = []
    n = chain[-1] if chain else -1
    while n >= 0:
        anchors.append(common[n])
        n = previous[n]
    return anchors[::-1]


def _single_runs(tokens: list[str]) -> dict[tuple[str, ...], int]:
    """The start of every run of ANCHOR tokens that occurs once, in the order of the text."""
    runs = list(zip(*(tokens[n:] for n in range(ANCHOR)), strict=False))
    counts = Counter(runs)
    return {run: n for n, run in enumerate(runs) if counts[run] == 1}


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
