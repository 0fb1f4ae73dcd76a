"""Decides one line of a claim: its interval, what was needed, and the word that follows from both.

WORDS follow from the printed interval and the printed needed value, and from nothing else.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnscope.spec.claims import Line, Quantity
from attnscope.stats.families import at_least, prompts_for
from attnscope.stats.means import MINIMUM, Contrast, Tested, paired
from attnscope.stats.tables import Matrix, possible

WORDS = ("holds", "smaller than claimed", "opposite", "open", "cannot tell")
"""The interval lies wholly at or beyond what is needed; wholly short of it; wholly on the other
side of none (of a fixed number or range: outside it); it contains what is needed; there is none."""
ONE_IN = 10
"""A row does not count if more than one in so many of its prompts have no value."""
NAMED = 10
"""The largest number of supporting heads that are named."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line on one row: a layer, the mean over layers, or all heads together."""

    kind: str
    """What `estimate` is: "ratio", "difference", "value", "heads" or "layers"."""
    word: str
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
    """The heads (layer.head) or layers that support it, strongest first."""
    note: str = ""


def contrast_of(line: Line, a: Matrix | None, b: Matrix, labels: dict[str, Any]) -> Contrast:
    """The contrast of a line; a fixed number has 0 on the other side."""
    within = _possible(line.left)
    if a is None or line.right is None:
        return paired(np.zeros_like(b.x), b.x, **labels, ranges=((0.0, 0.0), within))
    return paired(a.x, b.x, **labels, ranges=(_possible(line.right), within))


def decide(line: Line, b: Matrix, contrast: Contrast, alpha: float) -> list[Result]:
    """One result per row, or one for all heads or layers; `alpha` is what the line may use."""
    missing = len(b.x) - contrast.second.prompts
    spoilt = missing * ONE_IN > len(b.x)
    if line.scope.kind in ("heads", "layers"):
        return [_count(line, b, contrast, alpha, spoilt)]
    rows = []
    for at in range(b.columns.height):
        result = _row(line, _column(contrast, at), alpha)
        if spoilt[at]:
            note = f"no value in {missing[at]} of {len(b.x)} prompts, more than 1 in {ONE_IN}"
            result = replace(result, word=WORDS[4], low=None, high=None, p=None, note=note)
        elif missing[at]:
            result = replace(result, note=f"no value in {missing[at]} of {len(b.x)} prompts")
        rows.append(result)
    return rows


def word_of(
    line: Line, low: float, high: float, needed: tuple[float, ...], none: float | None
) -> str:
    """The word for an interval; `none` is the value of no difference, if there is one."""
    if len(needed) == 2:
        if low >= needed[0] and high <= needed[1]:
            return WORDS[0]
        return WORDS[2] if low > needed[1] or high < needed[0] else WORDS[3]
    sign = 1 if line.relation == "more" else -1
    near, far = sorted((sign * low, sign * high))
    bound = sign * needed[0]
    if near >= bound:
        return WORDS[0]
    if far >= bound:
        return WORDS[3]
    return WORDS[2] if none is None or far < sign * none else WORDS[1]


def _row(line: Line, contrast: Contrast, alpha: float) -> Result:
    """The result of one column."""
    needed: tuple[float, ...] = line.bounds or (
        line.factor if line.right and not line.offset else line.offset,
    )
    mean_a, mean_b = float(contrast.mean_a[0]), float(contrast.mean_b[0])
    factor, none = 0.0 if line.right is None else line.factor, None
    if line.right is not None and not line.offset and mean_a > 0:
        kind, none = "ratio", 1.0
        estimate, low, high = (float(end[0]) for end in contrast.ratio(level=1 - alpha))
        tests = [contrast.at(c) for c in needed]
    else:
        if line.right is not None and not line.offset:  # no ratio: b - c * a against 0
            needed = tuple((bound - line.factor) * mean_a for bound in needed)
        tested = contrast.at(factor)
        kind = "value" if line.right is None else "difference"
        none = 0.0 if kind == "difference" and line.factor == 1 else None
        estimate = float(tested.estimate[0])
        low, high = (float(end[0]) for end in tested.interval(1 - alpha))
        tests = [contrast.at(factor, d) for d in needed]
    units, n = int(contrast.units[0]), int(contrast.second.prompts[0])
    sides = {"before": None if line.right is None else mean_a, "after": mean_b}
    shared: dict[str, Any] = {
        "needed": needed,
        "n": n,
        "units": units,
        "estimate": estimate,
        **sides,
    }
    if np.isnan(low) or np.isnan(high):
        return Result(kind, WORDS[4], **shared, note=_why(tests[0], alpha))
    p = _p(line, tests)
    corrected = None if np.isnan(p) else min(1.0, p * 0.05 / alpha)
    word = word_of(line, low, high, needed, none)
    note = "skewed across prompts: use more prompts or medians" if _skewed(tests[0]) else ""
    return Result(kind, word, **shared, low=low, high=high, p=corrected, note=note)


def _p(line: Line, tests: list[Tested]) -> float:
    """Two-sided p against what is needed; of a range, that of being inside."""
    if len(tests) == 1:
        return float(tests[0].two_sided()[0])
    return min(1.0, 2 * float(np.maximum(tests[0].more(), tests[1].less())[0]))


def _skewed(tested: Tested) -> bool:
    return bool(abs(tested.skew[0]) > 0.3)


def _why(tested: Tested, alpha: float) -> str:
    """Why there is no interval."""
    units, informative = int(tested.units[0]), int(tested.informative[0])
    needed = max(MINIMUM, int(np.ceil(1 - np.log2(alpha))))
    if units < needed:
        return f"needs at least {needed} prompts or clusters, and there are {units}"
    if informative < needed:
        return f"only {informative} of {units} prompts differ from the most common value"
    return "all prompts have the same value"


def _count(
    line: Line, b: Matrix, contrast: Contrast, alpha: float, spoilt: np.ndarray[Any, Any]
) -> Result:
    """How many heads or layers, at least and at most (partial conjunction)."""
    factor = 0.0 if line.right is None else line.factor
    if line.bounds is not None:
        ends = [contrast.at(x) if line.right else contrast.at(0.0, x) for x in line.bounds]
        supports = np.fmax(ends[0].more(), ends[1].less())
        opposes = np.minimum(2 * np.fmin(ends[0].less(), ends[1].more()), 1.0)
        beyond = (ends[0].estimate >= 0) & (ends[1].estimate <= 0)
    else:
        tested = contrast.at(factor, line.offset)
        supports, opposes = tested.more(), tested.less()
        beyond = tested.estimate > 0
        if line.relation == "less":
            supports, opposes, beyond = opposes, supports, tested.estimate < 0
    supports, opposes = (np.where(spoilt, np.nan, p) for p in (supports, opposes))
    rows = len(supports)
    needed = line.scope.needed(rows)
    low, high = at_least(supports, alpha / 2), rows - at_least(opposes, alpha / 2)
    units = int(contrast.units.min())
    other = at_least(_other_side(line, contrast, opposes), alpha / 2)
    word = WORDS[0] if low >= needed else WORDS[3]
    if high < needed:
        word = WORDS[2] if other >= needed else WORDS[1]
    note = ""
    least = prompts_for(rows, needed, alpha / 2)
    if needed > rows:
        word, note = WORDS[4], f"there are only {rows} {line.scope.kind}"
    elif word == WORDS[3] and units < least:
        word = WORDS[4]
        note = f"{rows} {line.scope.kind} need at least {least} prompts, and there are {units}"
    elif spoilt.any():
        note = f"{int(spoilt.sum())} of {rows} have no value in more than 1 in {ONE_IN} prompts"
    order = np.argsort(np.nan_to_num(supports, nan=1.0), kind="stable")[: min(low, NAMED)]
    names = [_name(*b.columns.select("layer", "head").row(int(at))) for at in order]
    return Result(
        line.scope.kind,
        word,
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


def _other_side(line: Line, contrast: Contrast, opposes: Any) -> Any:
    """p of the opposite in each row: beyond none if there is one, else beyond what is needed."""
    if line.bounds is not None or line.right is None:
        return opposes
    tested = contrast.at(1.0)
    return np.fmax(opposes, tested.less() if line.relation == "more" else tested.more())


def _name(layer: int, head: int | None) -> str:
    return f"layer {layer}" if head is None else f"{layer}.{head}"


def _possible(quantity: Quantity) -> tuple[float, float]:
    return possible(quantity.measure, quantity.scale)


def _column(contrast: Contrast, at: int) -> Contrast:
    """One column of a contrast."""

    def one(design: Any) -> Any:
        names = ("x", "sums", "sizes", "parts")
        matrices = {name: getattr(design, name)[:, [at]] for name in names}
        vectors = ("mean", "degrees", "prompts", "units")
        return replace(design, **matrices, **{n: getattr(design, n)[[at]] for n in vectors})

    return replace(contrast, first=one(contrast.first), second=one(contrast.second))
