"""Two views side by side: which tokens are the same on both, and by what factor attention fell.

Sides of one prompt are aligned by the proof of ids that their insertions carry; one text read by
two models by the places of its tokens; two texts by the longest runs of tokens they share. Numbers
alone: this module must not know models or HTTP.
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
"""Tokens that runs are searched among; beyond, only a common beginning and end are aligned."""
KEPT = 8
"""Alignments that are cached, one for each pair of views."""

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Aligned:
    """Tokens of both sides that are the same."""

    a: Indices
    b: Indices
    """`b[n]` is the twin of `a[n]`; both in order."""
    alone_a: int
    alone_b: int
    """Tokens without a twin, those of fillers aside: seams, and what differs."""


class Alignments:
    """The last alignments, by the ids of their views: a zoom does not align again."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], Aligned] = {}

    def of(self, a: View, b: View) -> Aligned:
        """The aligned tokens of two views; they do not change while layers are added."""
        found = self._of.get((a.id, b.id))
        if found is None:
            found = align(a, b)
            self._of = dict([*self._of.items(), ((a.id, b.id), found)][-KEPT:])
        return found


def align(a: View, b: View) -> Aligned:
    """The twins of two views."""
    of_a, of_b = _of_base(a), _of_base(b)
    if _same_base(a, b):
        pairs = [(of_a[n], of_b[n]) for n in sorted(of_a.keys() & of_b.keys())]
    elif a.asked.filler is None and b.asked.filler is None and _text(a) == _text(b):
        at = {place: n for n, place in enumerate(_places(a))}
        pairs = [(at[place], n) for n, place in enumerate(_places(b)) if place in at]
    else:
        pairs = _runs(a.tokens[: a.prompt], b.tokens[: b.prompt])
        filler_a, filler_b = set(a.filler), set(b.filler)
        pairs = [(m, n) for m, n in pairs if m not in filler_a and n not in filler_b]
    found = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return Aligned(
        found[:, 0],
        found[:, 1],
        alone_a=a.prompt - len(a.filler) - len(found),
        alone_b=b.prompt - len(b.filler) - len(found),
    )


def _of_base(view: View) -> dict[int, int]:
    """For a token of the prompt without filler, where it stands."""
    twins = view.twins if view.twins is not None else range(view.prompt)
    return {base: n for n, base in enumerate(twins) if base >= 0}


def _same_base(a: View, b: View) -> bool:
    """Whether both are the same prompt, read by the same model, their fillers aside."""
    same = ("text", "chat", "system")
    return a.model == b.model and all(
        getattr(a.asked, name) == getattr(b.asked, name) for name in same
    )


def _text(view: View) -> str:
    return "".join(view.tokens[: view.prompt])


def _places(view: View) -> list[tuple[int, str]]:
    """Where each token of the prompt begins in the text, and what it says."""
    said = view.tokens[: view.prompt]
    begins = [0, *accumulate(len(text) for text in said)]
    return list(zip(begins, said, strict=False))


def _runs(a: list[str], b: list[str]) -> list[tuple[int, int]]:
    """What two texts share: their common beginning and end, and runs between them."""
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
    """λ of b on a, what it would be under uniform attention, and how evenly fillers receive."""
    ours, theirs = (view.shade("average", "all", layer, head) for view in (a, b))
    uniform = [view.uniform_average[view.at(layer)] for view in (a, b)]
    everything = np.ones(len(aligned.a), dtype=bool)
    factor, means, fit, size = slope(
        ours[aligned.a].astype(np.float64), theirs[aligned.b].astype(np.float64), everything
    )
    expected, *_ = slope(
        uniform[0][aligned.a].astype(np.float64),
        uniform[1][aligned.b].astype(np.float64),
        everything,
    )
    told = {
        "lambda": float(factor),
        "lambda_ratio": float(means),
        "lambda_r2": float(fit),
        "uniform_slope": float(expected),
        "tokens": float(size),
    }
    for side, view, values in (("a", a, ours), ("b", b, theirs)):
        if view.filler:
            told[f"uniformity_{side}"] = _uniformity(values, view.filler)
    return told


def _uniformity(values: Float32s, filler: list[int]) -> float:
    inside = np.zeros(len(values), dtype=bool)
    inside[filler] = True
    return float(uniformity(values.astype(np.float64), inside)[0])
