"""Decides one line of a claim: its interval, what was needed, and the word that follows from both.

WORDS follow from the printed interval and the printed needed value, and from nothing else.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.run.tables import Matrix, possible
from attnscope.spec.claims import Line
from attnscope.stats.clusters import Floats
from attnscope.stats.families import at_least, prompts_for
from attnscope.stats.means import SKEW_NOTE, SKEWED, Contrast, Tested, paired

WORDS = ("holds", "smaller than claimed", "opposite", "open", "cannot tell")
"""The interval lies wholly at or beyond what is needed; wholly short of it; wholly on the other
side of none (of a fixed number or range: outside it); it contains what is needed; there is none.
A number of heads or layers is never opposite."""
HOLDS, SMALLER, OPPOSITE, OPEN, CANNOT_TELL = WORDS
ALPHA = 0.05
"""All intervals of a claim hold together at the level 1 - ALPHA."""
ONE_IN = 10
"""A row does not count if more than one in so many of its prompts have no value."""
NAMED = 10
"""The largest number of supporting heads that are named."""
COUNTS = ("heads", "layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line on one row: a layer, the mean over layers, or all heads together."""

    kind: str
    """What `estimate` is: "ratio", "difference", "value", "heads" or "layers"."""
    word: str = CANNOT_TELL
    before: float | None = None
    after: float | None = None
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    needed: tuple[float, ...] = ()
    """One number, or the two ends of `within`."""
    p: float | None = None
    """Against what is needed, corrected for all intervals of the claim."""
    n: int = 0
    units: int = 0
    rows: int = 1
    """Heads or layers."""
    heads: tuple[str, ...] = ()
    """The heads (layer.head) or layers that support it, strongest first. If it is open: those whose
    estimate is beyond, up to `NAMED`; the first `low` of them support it."""
    note: str = ""


def contrast_of(line: Line, a: Matrix | None, b: Matrix, labels: dict[str, Any]) -> Contrast:
    """The contrast of a line; a fixed number has 0 on the other side."""
    of_b, *of_a = (possible(quantity.measure, quantity.scale) for quantity in line.quantities)
    first = np.zeros_like(b.x) if a is None else a.x
    return paired(first, b.x, **labels, ranges=(of_a[0] if of_a else (0.0, 0.0), of_b))


def decide(line: Line, b: Matrix, contrast: Contrast, alpha: float) -> list[Result]:
    """One result per row, or one for all heads or layers; `alpha` is what the line may use."""
    missing = len(b.x) - contrast.second.prompts
    spoilt = missing * ONE_IN > len(b.x)
    if line.scope.kind in COUNTS:
        return [_count(line, b, contrast, alpha, spoilt)]
    rows = _rows(line, contrast, alpha)
    for at in np.flatnonzero(missing):
        note = f"no value in {missing[at]} of {len(b.x)} prompts"
        if spoilt[at]:
            nothing: dict[str, Any] = {"word": CANNOT_TELL, "low": None, "high": None, "p": None}
            rows[at] = replace(rows[at], note=f"{note}, more than 1 in {ONE_IN}", **nothing)
        else:
            rows[at] = replace(rows[at], note="; ".join(filter(None, (note, rows[at].note))))
    return rows


def none_of(line: Line, kind: str) -> float | None:
    """The value of no difference, if there is one."""
    if kind == "ratio":
        return 1.0
    return 0.0 if kind == "difference" and line.factor == 1 else None


def word_of(
    line: Line, low: float, high: float, needed: tuple[float, ...], none: float | None
) -> str:
    """The word for an interval; `none` is the value of no difference, if there is one."""
    if len(needed) == 2:
        if low >= needed[0] and high <= needed[1]:
            return HOLDS
        return OPPOSITE if low > needed[1] or high < needed[0] else OPEN
    sign = 1 if line.relation == "more" or line.scope.kind in COUNTS else -1
    near, far = sorted((sign * low, sign * high))
    bound = sign * needed[0]
    if near >= bound or far >= bound:
        return HOLDS if near >= bound else OPEN
    if line.scope.kind in COUNTS:
        return SMALLER
    return OPPOSITE if none is None or far < sign * none else SMALLER


def _rows(line: Line, contrast: Contrast, alpha: float) -> list[Result]:
    """The results of all columns: ratios of means where both sides are quantities, else means."""
    right = line.right is not None
    factor = line.factor if right else 0.0
    limits = line.bounds or ((line.factor,) if right and not line.offset else (line.offset,))
    ways = {}
    if right and not line.offset:
        tests = [contrast.at(c) for c in limits]
        ways["ratio"] = limits, contrast.ratio(1 - alpha), tests
    if not ways or (line.bounds is None and (contrast.first.mean <= 0).any()):
        # Without a mean above 0 there is no ratio, but `b - c * a` against 0 is the same claim.
        limits = (0.0,) if ways else limits
        tests = [contrast.at(factor, d) for d in limits]
        mean = contrast.at(factor)
        kind = "difference" if right else "value"
        ways[kind] = limits, (mean.estimate, *mean.interval(1 - alpha)), tests
    first, *others = ways
    results = []
    for at, mean_a in enumerate(contrast.first.mean):
        kind = others[0] if others and mean_a <= 0 else first
        limits, ends, tests = ways[kind]
        result = Result(
            kind=kind,
            needed=limits,
            before=float(mean_a) if right else None,
            after=float(contrast.second.mean[at]),
            n=int(contrast.second.prompts[at]),
            units=int(contrast.units[at]),
        )
        results.append(_decided(line, result, [float(end[at]) for end in ends], tests, at, alpha))
    return results


def _decided(
    line: Line, result: Result, ends: list[float], tests: list[Tested], at: int, alpha: float
) -> Result:
    """A result with its interval, p and word, or why there is none. The set of ratios that are not
    rejected may have gaps; then the interval and p are those of the whole range."""
    estimate, low, high = ends
    p = _p([(float(test.more()[at]), float(test.less()[at])) for test in tests])
    if np.isnan([low, high, p]).any():
        shown = None if np.isnan(estimate) else estimate
        return replace(result, estimate=shown, note=_why(tests[0], at, alpha))
    for limit, test in zip(result.needed, tests, strict=True):
        if test.two_sided()[at] > alpha:
            low, high = min(low, limit), max(high, limit)
    word = word_of(line, low, high, result.needed, none_of(line, result.kind))
    p = max(p, alpha) if word == OPEN else p
    return replace(
        result,
        word=word,
        estimate=estimate,
        low=low,
        high=high,
        p=min(1.0, p * ALPHA / alpha),
        note=SKEW_NOTE if abs(tests[0].skew[at]) > SKEWED else "",
    )


def _p(tails: list[tuple[float, float]]) -> float:
    """Two-sided p against what is needed, from the p of more and of less; of a range, that of
    lying inside or outside, whichever is smaller. nan if one is."""
    if np.isnan(tails).any():
        return float("nan")
    (above, below), (above_high, below_high) = tails[0], tails[-1]
    inside = 1.0 if len(tails) == 1 else max(above, below_high)
    return min(1.0, 2 * min(inside, below, above_high))


def _why(tested: Tested, at: int, alpha: float) -> str:
    """Why there is no interval."""
    units, informative = int(tested.units[at]), int(tested.informative[at])
    needed = prompts_for(1, alpha / 2)
    if units < needed:
        return f"needs at least {needed} prompts or clusters, and there are {units}"
    if informative < needed:
        return f"only {informative} of {units} prompts differ from the most common value"
    if tested.error[at] == 0:
        return "all prompts have the same value"
    return "the right side is not above 0, so there is no ratio"


def _count(
    line: Line, b: Matrix, contrast: Contrast, alpha: float, spoilt: NDArray[np.bool_]
) -> Result:
    """How many heads or layers, at least and at most (partial conjunction)."""
    supports, opposes, beyond = _votes(line, contrast)
    supports, opposes = (np.where(spoilt, np.nan, p) for p in (supports, opposes))
    rows = len(supports)
    needed = line.scope.needed(rows)
    low, high = at_least(supports, alpha / 2), rows - at_least(opposes, alpha / 2)
    units = int(contrast.units[~spoilt].min(initial=len(b.x))) if not spoilt.all() else 0
    word = word_of(line, low, high, (needed,), None)
    least = prompts_for(rows, alpha / 2)
    note = ""
    if needed > rows:
        word, note = CANNOT_TELL, f"there are only {rows} {line.scope.kind}"
    elif spoilt.all():
        word = CANNOT_TELL
        note = f"each of the {rows} has no value in more than 1 in {ONE_IN} prompts"
    elif word == OPEN and units < least:
        word = CANNOT_TELL
        note = f"{rows} {line.scope.kind} need at least {least} prompts, and there are {units}"
    elif spoilt.any():
        note = f"{int(spoilt.sum())} of {rows} have no value in more than 1 in {ONE_IN} prompts"
    order = np.argsort(np.nan_to_num(supports, nan=1.0), kind="stable")
    order = (order[:low] if word != OPEN else order[(beyond & ~spoilt)[order]])[:NAMED]
    columns = [b.columns.select("layer", "head").row(int(at)) for at in order]
    names = [f"layer {layer}" if head is None else f"{layer}.{head}" for layer, head in columns]
    return Result(
        kind=line.scope.kind,
        word=word,
        estimate=float(beyond.sum()),
        low=float(low),
        high=float(high),
        needed=(float(needed),),
        n=int(contrast.second.prompts.max()),
        units=units,
        rows=rows,
        heads=tuple(names),
        note=note,
    )


def _votes(line: Line, contrast: Contrast) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """One-sided p for and against the line in each row, and which estimates are beyond."""
    factor = 0.0 if line.right is None else line.factor
    if line.bounds is None:
        tested = contrast.at(factor, line.offset)
        if line.relation == "less":
            return tested.less(), tested.more(), tested.estimate < 0
        return tested.more(), tested.less(), tested.estimate > 0
    low, high = (contrast.at(x) if line.right else contrast.at(0.0, x) for x in line.bounds)
    outside = np.minimum(2 * np.fmin(low.less(), high.more()), 1.0)
    if line.right is not None and contrast.ranges[0][0] < 0:  # a range of ratios needs a above 0
        above = np.nan_to_num(contrast.at(-1.0, 0.0, 0.0).more(), nan=0.0)
        outside = np.fmax(outside, np.where(contrast.first.mean > 0, above, 1.0))
    inside = (low.estimate >= 0) & (high.estimate <= 0)
    return np.maximum(low.more(), high.less()), outside, inside
