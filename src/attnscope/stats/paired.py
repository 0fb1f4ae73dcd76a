"""Compares models, conditions, classes, queries or keys prompt by prompt, for every layer, head and
measure: differences and ratios of means with intervals, p-values and corrected p-values.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from attnscope.errors import InputError, unknown
from attnscope.measures.registry import COLUMNS
from attnscope.run import tables
from attnscope.run.tables import Matrix, Values, matrix, ranges
from attnscope.stats.clusters import intraclass
from attnscope.stats.families import false_discovery, romano_wolf
from attnscope.stats.means import (
    MINIMUM,
    SKEW_NOTE,
    SKEWED,
    Contrast,
    effect_of,
    paired,
    unpaired,
)
from attnscope.stats.resampling import ResamplingUnits

Pair = tuple[str, str]
Pairs = Pair | list[Pair] | str | None
"""(first, second); several pairs; "all"; or the only two that there are."""

OVER = ("model", "condition", "item", "queries", "keys")
"""What can be compared; `item` are classes."""
OUTCOMES = ("different", "about none", "open", "cannot tell")
"""Outcomes of a row: q is at most 0.05; the difference is within the margin; neither; there is no
p-value."""
TESTED = "Student's t and its correction for skewness, whichever is larger"
"""How p is computed, for captions."""


def compare(
    values: Values,
    *,
    over: str = "model",
    pair: Pairs = None,
    combine: str = "each",
    normalise: str = "mass",
    paired: bool | None = None,
    prompts: pl.DataFrame | None = None,
    cluster: str | None = None,
    strata: str | None = None,
    margin: float | str | None = None,
    level: float = 0.95,
    family_wise: bool = False,
) -> pl.DataFrame:
    """The second of a pair against the first: one row per layer, head and thing measured.

    over         one of `OVER`; the others are fixed
    pair         (first, second), several pairs that are corrected together, or "all"; needed if
                 there are more than two
    combine      how heads are combined: "mean", "sum", "max", or "each" for single heads
    normalise    how masses are shown: "mass", "per-token", "share" or "lift"
    paired       by prompt (True) or as two independent groups (False); by default paired, unless
                 the two have no prompt in common
    prompts      prompt metadata: a column `prompt`, and those of `cluster` and `strata`
    margin       the smallest difference that counts, a number or "5%" of the first's mean; with a
                 margin, differences are also tested for equivalence
    family_wise  also give `p_fwer`, the p-value over all layers and heads of a quantity

    docs/statistics.md describes the columns.
    """
    _check(over, level)
    sources = ResamplingUnits(prompts, cluster, strata)
    known = values.lazy().select(pl.col(over).drop_nulls().unique(maintain_order=True)).collect()
    chosen = pairs_of(known[over].to_list(), over, pair)
    by = [name for name in tables.IDENTITY if name != over]
    chosen_rows = values.lazy().filter(pl.col(over).is_in([*itertools.chain(*chosen)]))
    prepared = tables.normalise(tables.combine(chosen_rows, combine), normalise)
    parts, warnings = [], []
    for two in chosen:
        sides = _sides(prepared, over, two, by, paired)
        parts.append(_rows(sides, sources, (normalise, combine), margin, level, family_wise))
        a, b = sides.a, sides.b
        samples = [(b.x - a.x, b)] if sides.paired else [(a.x, a), (b.x, b)]
        warnings += [one for x, side in samples for one in sources.warnings(x, side.prompts)]
    table = _corrected(pl.concat(parts, how="diagonal_relaxed"), len(chosen))
    table = table.with_columns(
        pl.when(pl.col("measure") == "mass").then(pl.lit(normalise)).alias("normalise"),
        pl.lit(combine).alias("combine"),
        _outcome(1 - level, equivalence="q_equivalence" in table.columns),
        _note(list(dict.fromkeys(warnings))),
    )
    return _in_order(table, chosen, by)


def _check(over: str, level: float) -> None:
    if over not in OVER:
        raise unknown("comparison over", over, OVER)
    if not 0 < level < 1:
        raise InputError(
            f"level={level!r} is out of range; allowed: between 0 and 1, for example 0.95",
            code="out-of-range",
            name="level",
            value=level,
        )


def _corrected(table: pl.DataFrame, pairs: int) -> pl.DataFrame:
    """q and its like over all pairs; the family-wise p times their number."""
    family = _family(table)
    for p, q in (("p", "q"), ("p_equivalence", "q_equivalence")):
        if p in table:
            known = table[p].fill_null(np.nan).to_numpy()
            table = table.with_columns(_series(q, false_discovery(known, family)))
    if "p_fwer" in table:
        table = table.with_columns((pl.col("p_fwer") * pairs).clip(0.0, 1.0))
    return table


def _in_order(table: pl.DataFrame, pairs: Sequence[Pair], by: list[str]) -> pl.DataFrame:
    """Rows in the order of the pairs, and columns in the order of docs/statistics.md."""
    labels, last = ["a", "b", *by, "normalise", "combine"], ["outcome", "paired", "note"]
    number = {two: at for at, two in enumerate(pairs)}
    rank = pl.Series("pair", [number[two] for two in table.select("a", "b").iter_rows()])
    rows = table.with_columns(rank).sort(["pair", *by])
    return rows.select(*labels, pl.exclude(*labels, *last, "pair", "unlike"), *last)


@dataclass(frozen=True, slots=True)
class _Sides:
    """First and second of a pair."""

    columns: pl.DataFrame
    """Labels of the columns, with `a`, `b`, `paired` and `unlike`."""
    a: Matrix
    b: Matrix
    paired: bool


def _rows(
    sides: _Sides,
    sources: ResamplingUnits,
    shown: tuple[str, str],
    margin: float | str | None,
    level: float,
    family_wise: bool,
) -> pl.DataFrame:
    """The statistics of one pair."""
    a, b, measures = sides.a, sides.b, sides.columns["measure"].to_list()
    ends = {name: tables.possible(name, *shown) for name in set(measures)}
    lowest, highest = np.array([ends[name] for name in measures]).T
    ranges = ((lowest, highest), (lowest, highest))
    labels = [sources.labels(side.prompts) for side in (a, b)]
    if sides.paired:
        contrast = paired(a.x, b.x, **labels[1], ranges=ranges)
    else:
        contrast = unpaired(a.x, b.x, labels, ranges)
    tested = contrast.at(1.0)
    low, high = tested.interval(level)
    ratio, ratio_low, ratio_high = contrast.ratio(level)
    n = np.minimum(contrast.first.prompts, contrast.second.prompts)
    used = n if sides.paired else contrast.first.prompts + contrast.second.prompts
    label = labels[1]["cluster"] if sides.paired else None
    known: dict[str, Any] = {
        "n": n,
        "units": contrast.units,
        "mean_a": contrast.first.mean,
        "mean_b": contrast.second.mean,
        "difference": tested.estimate,
        "low": low,
        "high": high,
        "ratio": np.where(contrast.second.mean >= 0, ratio, np.nan),
        "ratio_low": ratio_low,
        "ratio_high": np.where(np.isinf(ratio_high), np.nan, ratio_high),
        "effect": effect_of(contrast),
        "skew": tested.skew,
        "informative": tested.informative,
        "p": tested.two_sided(),
        "left_out": (len(b.x) if sides.paired else len(a.x) + len(b.x)) - used,
        "icc": np.full(len(n), np.nan) if label is None else intraclass(b.x - a.x, label),
    }
    if margin is not None:
        known["p_equivalence"] = _equivalence(contrast, margin)
    if family_wise:
        known["p_fwer"] = romano_wolf(contrast, _family(sides.columns))
    return sides.columns.with_columns(_series(name, figure) for name, figure in known.items())


def _equivalence(contrast: Contrast, margin: float | str) -> NDArray[np.float64]:
    """p of a difference within the margin: two one-sided tests, of `b - a` against the margin, or
    of `b - 0.95 a` and `b - 1.05 a` against 0."""
    relative = isinstance(margin, str) and margin.strip().endswith("%")
    try:
        size = float(str(margin).strip().removesuffix("%"))
    except ValueError:
        size = -1.0
    if not (np.isfinite(size) and size > 0):
        raise InputError(
            f"margin={margin!r} is no margin; give a number above 0, or a percentage of the "
            "first's mean such as 5%",
            code="bad-margin",
            value=margin,
        )
    if relative:
        sign = np.sign(contrast.first.mean)  # of a negative mean, 1.05 times it is the lower end
        ends = [contrast.at(1 - sign * size / 100), contrast.at(1 + sign * size / 100)]
    else:
        ends = [contrast.at(1.0, -size), contrast.at(1.0, size)]
    return np.maximum(ends[0].more(), ends[1].less())


def pairs_of(known: Sequence[str], over: str, pair: Pairs) -> list[Pair]:
    """The pairs to compare, of the names that there are."""
    if isinstance(pair, list):
        return pair
    word = "class" if over == "item" else over
    if pair in (None, "all") and len(known) < 2:
        raise InputError(
            f"a comparison needs two values of {word}; there are: {', '.join(known) or 'none'}",
            code="nothing-to-compare",
            over=over,
            known=known,
        )
    if pair == "all" or (pair is None and len(known) == 2):
        return list(itertools.combinations(known, 2))
    if pair is None:
        raise InputError(
            f"there are {len(known)} values of {word}: {', '.join(known)}; choose two with pair=, "
            "or compare all with pair='all'",
            code="ambiguous-pair",
            over=over,
            known=known,
        )
    if isinstance(pair, str):
        raise InputError(
            f"pair={pair!r} is no pair; give (first, second) or 'all'", code="bad-pair", value=pair
        )
    for name in pair:
        if name not in known:
            raise unknown(word, name, known)
    if pair[0] == pair[1]:
        raise InputError(
            f"{word} {pair[0]!r} cannot be compared with itself; give two different ones",
            code="bad-pair",
            value=pair,
        )
    return [pair]


def _sides(
    table: pl.DataFrame, over: str, pair: Pair, by: list[str], paired: bool | None
) -> _Sides:
    first, second = (table.filter(pl.col(over) == name) for name in pair)
    if paired is None:
        paired = bool(set(first["prompt"]) & set(second["prompt"]))
    if paired:
        _check_paired((first, second), pair, over)
    # Measures of one side only (the base has no pair measures) are not compared.
    has = [side.select(by).unique() for side in (first, second)]
    common = [
        side.join(other, on=by, how="semi", nulls_equal=True)
        for side, other in ((first, has[1]), (second, has[0]))
    ]
    if common[0].is_empty():
        raise _nothing_in_common(first, second, over, pair)
    prompts = [None, None] if not paired else [sorted(common[0]["prompt"].unique())] * 2
    a, b = (matrix(side, by, of) for side, of in zip(common, prompts, strict=True))
    columns = a.columns.with_columns(
        pl.lit(pair[0]).alias("a"),
        pl.lit(pair[1]).alias("b"),
        pl.lit(paired).alias("paired"),
        pl.lit(_shape_note(first, second, pair), dtype=pl.String()).alias("unlike"),
    )
    return _Sides(columns, a, b, paired)


def _nothing_in_common(
    first: pl.DataFrame, second: pl.DataFrame, over: str, pair: Pair
) -> InputError:
    """Why two sides cannot be compared, and what to do."""
    word = "class" if over == "item" else over
    known: dict[str, Any] = {"over": over, "pair": pair}
    if not (first.is_empty() or second.is_empty()):
        return InputError(
            f"{word} {pair[0]!r} and {pair[1]!r} have no measured quantity in common",
            code="nothing-to-compare",
            **known,
        )
    lacking, other = pair if first.is_empty() else pair[::-1]
    measures = sorted(set(first["measure"]) | set(second["measure"]))
    changes = all(m in COLUMNS and COLUMNS[m].compares_to_base for m in measures)
    if over == "condition" and measures and changes:
        return InputError(
            f"{lacking!r} has no values, because {', '.join(measures)} are already changes from "
            f"it; compare two other conditions (--pair {other},SECOND), or judge a claim about "
            f"{measures[-1]}[condition={other}] with --claims",
            code="already-changes",
            measures=measures,
            **known,
        )
    return InputError(
        f"{word} {lacking!r} has no values in this run yet; finish the run, which "
        "`attnscope run` with the same experiment and directory continues",
        code="no-values",
        value=lacking,
        **known,
    )


def _shape_note(first: pl.DataFrame, second: pl.DataFrame, pair: Pair) -> str | None:
    """A note if the two have different layers or heads, which are matched by number."""
    notes = []
    for what in ("layer", "head"):
        numbers = [set(side[what].drop_nulls()) for side in (first, second)]
        if numbers[0] != numbers[1]:
            notes.append(
                f"{what}s are matched by number, and {pair[0]} has {ranges(numbers[0])}, "
                f"{pair[1]} {ranges(numbers[1])}: the others are left out"
            )
    return "; ".join(notes) or None


def _check_paired(sides: tuple[pl.DataFrame, pl.DataFrame], pair: Pair, over: str) -> None:
    """Refuse prompts that only one side has."""
    held = "condition" if over == "model" else "model"
    measured = [set(side.select(held, "prompt").unique().iter_rows()) for side in sides]
    alone: dict[tuple[str, str], list[int]] = {}
    for at, name in enumerate(pair):
        for fixed, prompt in sorted(measured[at] - measured[1 - at]):
            alone.setdefault((name, fixed), []).append(prompt)
    if alone:
        listed = "; ".join(
            f"only {over} {name!r} has prompts {ranges(prompts)} ({held} {fixed!r})"
            for (name, fixed), prompts in alone.items()
        )
        raise InputError(
            f"{listed}. A paired comparison needs both sides of every prompt: finish the run, "
            "leave these prompts out, or compare as independent groups with paired=False",
            code="unpaired-prompts",
            unpaired=alone,
        )


def _family(table: pl.DataFrame) -> NDArray[Any]:
    """Number of the family of each test: all layers and heads of one quantity, in all pairs."""
    same = [c for c in tables.IDENTITY if c in table.columns and c not in ("layer", "head")]
    return table.select(pl.struct(same).rank("dense")).to_series().to_numpy()


def _series(name: str, figure: Any) -> pl.Series:
    series = pl.Series(name, np.asarray(figure))
    return series.fill_nan(None) if series.dtype.is_float() else series.cast(pl.Int64)


def _outcome(alpha: float, *, equivalence: bool) -> pl.Expr:
    different, none, undecided, cannot_tell = map(pl.lit, OUTCOMES)
    small = pl.col("q_equivalence") <= alpha if equivalence else pl.lit(False)
    decided = pl.when(small).then(none).when(pl.col("q") <= alpha).then(different)
    known = pl.when(pl.col("q").is_null()).then(cannot_tell)
    return known.otherwise(decided.otherwise(undecided)).alias("outcome")


def _note(warnings: list[str]) -> pl.Expr:
    few, column = pl.col("units") < MINIMUM, pl.col
    parts = {
        "unpaired: {} and {} were measured on different prompts": (~column("paired"), "a", "b"),
        "{}": (column("unlike").is_not_null(), "unlike"),
        "no interval and no p-value: {} units; fewer than 6 cannot reach p < 0.05": (few, "units"),
        "prompts without a value, left out: {}": (column("left_out") > 0, "left_out"),
        "only {} of {} prompts differ from the most common value, and 6 are needed": (
            ~few & (column("informative") < MINIMUM),
            "informative",
            "units",
        ),
        SKEW_NOTE: (column("skew").abs() > SKEWED,),
    }
    texts = [
        pl.when(when).then(pl.format(text, *names) if names else pl.lit(text))
        for text, (when, *names) in parts.items()
    ]
    texts += [pl.when(True).then(pl.lit(warning)) for warning in warnings]
    return pl.concat_str(texts, separator="; ", ignore_nulls=True).alias("note")
