"""Compares models or conditions prompt by prompt, for every layer, head and measure.

The result has effect sizes, confidence intervals, permutation tests and corrected p-values.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from attnscope.errors import InputError, unknown
from attnscope.stats import tables
from attnscope.stats.arrays import Floats
from attnscope.stats.contrast import ContrastSettings, paired_contrast, unpaired_contrast
from attnscope.stats.correction import corrected
from attnscope.stats.intervals import MINIMUM, SKEWED
from attnscope.stats.resampling import ResamplingUnits
from attnscope.stats.tables import Values, matrix, ranges

Pair = tuple[str, str]

OUTCOMES = ("different", "different, but small", "no difference", "undetermined")
"""Outcomes of a row: q is at most 0.05 and the interval excludes 0; the same, but the difference is
smaller than the margin; the difference is smaller than the margin; none of these."""
_IDENTITY = ["queries", "keys", "classes", "measure", "item", "target", "layer", "head"]


def compare(
    values: Values,
    *,
    over: str = "model",
    pair: Pair | str | None = None,
    pairs: Sequence[Pair] | None = None,
    combine: str = "each",
    normalise: str = "mass",
    paired: bool | None = None,
    prompts: pl.DataFrame | None = None,
    cluster: str | Sequence[str] | None = None,
    strata: str | None = None,
    families: str = "each",
    margin: float | str | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> pl.DataFrame:
    """The second of a pair against the first: one row per layer, head and thing measured.

    over        "model" or "condition"; the other one is fixed in every row
    pair        (first, second) or "all"; needed if there are more than two
    pairs       several pairs in place of `pair`, corrected together
    combine     how heads are combined: "mean", "sum", "max", or "each" for single heads
    normalise   how masses are shown: "mass", "per-token", "share" or "lift"
    paired      by prompt (True) or as two independent groups (False); by default paired, unless
                the two have no prompt in common
    prompts     prompt metadata: a column `prompt`, and columns such as level or document
    cluster     metadata column to cluster by; for nested clusters list the outermost first
    strata      metadata column to stratify by
    families    layers × heads of one quantity are a family of tests: correct "each" family
                separately, all "pooled", or at "two-level"s
    margin      the smallest difference that counts, a number or "5%" of the first's mean; with a
                margin, differences are also tested for equivalence

    docs/statistics.md describes the columns.
    """
    if over not in ("model", "condition"):
        raise unknown("comparison over", over, ("model", "condition"))
    settings = ContrastSettings(
        level=level, resamples=resamples, seed=seed, families=families, margin=margin
    )
    sources = ResamplingUnits(prompts, cluster, strata)
    chosen = list(pairs) if pairs is not None else _pairs(values, over, pair)
    held = "condition" if over == "model" else "model"
    by = [held, *_IDENTITY]
    chosen_rows = values.lazy().filter(pl.col(over).is_in([*itertools.chain(*chosen)]))
    prepared = tables.normalise(tables.combine(chosen_rows, combine), normalise)
    sides = [_sides(prepared, over, two, held, by, paired) for two in chosen]
    find = _all_pairs if all(side.paired for side in sides) else _each_pair
    columns, figures, warnings = find(sides, by, settings, sources)
    table = columns.with_columns(
        pl.when(pl.col("measure") == "mass").then(pl.lit(normalise)).alias("normalise"),
        pl.lit(combine).alias("combine"),
        *(_series(name, figure) for name, figure in figures.items()),
    )
    table = table.with_columns(_outcome(table.columns, settings), _note(warnings))
    order = [*by[:5], "normalise", *by[5:7], "combine", *by[7:], *figures]
    return _in_order(table, chosen, by).select("a", "b", *order, "outcome", "paired", "note")


def _in_order(table: pl.DataFrame, pairs: Sequence[Pair], by: Sequence[str]) -> pl.DataFrame:
    number = {two: at for at, two in enumerate(pairs)}
    first = pl.Series("pair", [number[two] for two in table.select("a", "b").iter_rows()])
    return table.with_columns(first).sort(["pair", *by])


@dataclass(frozen=True, slots=True)
class _Sides:
    """First and second of a pair."""

    columns: pl.DataFrame
    """Labels of the columns, with `a`, `b`, `paired` and notes."""
    prompts: tuple[list[int], list[int]]
    x: tuple[Floats, Floats]
    paired: bool


def _pairs(values: Values, over: str, pair: Pair | str | None) -> list[Pair]:
    known: list[str] = (
        values.lazy().select(pl.col(over).unique(maintain_order=True)).collect()[over].to_list()
    )
    if pair == "all" or (pair is None and len(known) == 2):
        if len(known) < 2:
            raise InputError(
                f"a comparison needs two {over}s; there is one: {', '.join(known)}",
                code="nothing-to-compare",
                over=over,
                known=known,
            )
        return list(itertools.combinations(known, 2))
    if pair is None:
        raise InputError(
            f"there are {len(known)} {over}s: {', '.join(known)}; choose two with pair=, or "
            "compare all with pair='all'",
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
            raise unknown(over, name, known)
    if pair[0] == pair[1]:
        raise InputError(
            f"{over} {pair[0]!r} cannot be compared with itself; give two different {over}s",
            code="bad-pair",
            value=pair,
        )
    return [pair]


def _sides(
    table: pl.DataFrame, over: str, pair: Pair, held: str, by: list[str], paired: bool | None
) -> _Sides:
    first, second = (table.filter(pl.col(over) == name) for name in pair)
    if paired is None:
        paired = bool(set(first["prompt"]) & set(second["prompt"]))
    if paired:
        _check_paired((first, second), pair, over, held)
    # Measures of one side only (the base has no pair measures) are not compared.
    has = [side.select(by).unique() for side in (first, second)]
    common = [
        side.join(other, on=by, how="semi", nulls_equal=True)
        for side, other in ((first, has[1]), (second, has[0]))
    ]
    if common[0].is_empty():
        raise InputError(
            f"{over}s {pair[0]!r} and {pair[1]!r} have no measured quantity in common",
            code="nothing-to-compare",
            over=over,
            pair=pair,
        )
    prompts = [None, None] if not paired else [sorted(common[0]["prompt"].unique())] * 2
    a, b = (matrix(side, by, of) for side, of in zip(common, prompts, strict=True))
    columns = a.columns.with_columns(
        pl.lit(pair[0]).alias("a"),
        pl.lit(pair[1]).alias("b"),
        pl.lit(paired).alias("paired"),
        pl.lit(_shape_note(first, second, pair)).alias("unlike"),
        pl.lit(
            None
            if paired
            else f"unpaired: {over}s {pair[0]} and {pair[1]} were measured on different prompts"
        ).alias("unpaired"),
    )
    return _Sides(columns, (a.prompts, b.prompts), (a.x, b.x), paired)


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


def _check_paired(
    sides: tuple[pl.DataFrame, pl.DataFrame], pair: Pair, over: str, held: str
) -> None:
    """Refuse prompts that only one side has."""
    measured = [set(side.select(held, "prompt").unique().iter_rows()) for side in sides]
    unpaired: dict[tuple[str, str], list[int]] = {}
    for at, name in enumerate(pair):
        for fixed, prompt in sorted(measured[at] - measured[1 - at]):
            unpaired.setdefault((name, fixed), []).append(prompt)
    if unpaired:
        listed = "; ".join(
            f"only {over} {name!r} has prompts {ranges(prompts)} ({held} {fixed!r})"
            for (name, fixed), prompts in unpaired.items()
        )
        raise InputError(
            f"{listed}. A paired comparison needs both sides of every prompt: finish the run, "
            "leave these prompts out, or compare as independent groups with paired=False",
            code="unpaired-prompts",
            unpaired=unpaired,
        )


def _all_pairs(
    sides: list[_Sides], by: list[str], settings: ContrastSettings, sources: ResamplingUnits
) -> tuple[pl.DataFrame, dict[str, Any], list[str]]:
    """All pairs of the same prompts in one sample, so that their signs are flipped together."""
    prompts = sorted({prompt for side in sides for prompt in side.prompts[0]})
    row = {prompt: at for at, prompt in enumerate(prompts)}
    samples = []
    for at in (0, 1):
        x = np.full((len(prompts), sum(side.columns.height for side in sides)), np.nan)
        done = 0
        for side in sides:
            rows = [row[prompt] for prompt in side.prompts[0]]
            x[rows, done : done + side.columns.height] = side.x[at]
            done += side.columns.height
        samples.append(x)
    columns = pl.concat([side.columns for side in sides])
    labels = sources.labels(prompts)
    figures = paired_contrast(samples[0], samples[1], family_of(columns, by), settings, labels)
    if len(sides) > 1:  # prompts of other pairs do not count as left out
        of_pair = np.concatenate([np.full(s.columns.height, len(s.prompts[0])) for s in sides])
        figures["left_out"] = of_pair - figures["n"]
    return columns, figures, sources.warnings(samples[1] - samples[0], prompts)


def _each_pair(
    sides: list[_Sides], by: list[str], settings: ContrastSettings, sources: ResamplingUnits
) -> tuple[pl.DataFrame, dict[str, Any], list[str]]:
    """Pairs of different prompts, each tested separately; the correction is over all pairs."""
    contrasts, warnings = [], []
    for side in sides:
        labels = [sources.labels(of) for of in side.prompts]
        family = family_of(side.columns, by)
        if side.paired:
            contrasts.append(paired_contrast(*side.x, family, settings, labels[0]))
        else:
            contrasts.append(unpaired_contrast(*side.x, family, settings, (labels[0], labels[1])))
        for x, of in zip(side.x, side.prompts, strict=True):
            warnings += sources.warnings(x, of)
    figures = {name: np.concatenate([one[name] for one in contrasts]) for name in contrasts[0]}
    columns = pl.concat([side.columns for side in sides])
    if len(sides) > 1:
        family = family_of(columns, by)
        for p, q in (("p", "q"), ("p_equivalence", "q_equivalence")):
            if p in figures:
                figures[q] = corrected(figures[p], family, settings.families)
        figures["p_fwer"] = np.minimum(figures["p_fwer"] * len(sides), 1.0)
    return columns, figures, list(dict.fromkeys(warnings))


def family_of(columns: pl.DataFrame, by: list[str]) -> NDArray[Any]:
    """Number of the family of each test: all layers and heads of one quantity, in all pairs."""
    same = [name for name in by if name not in ("layer", "head")]
    if not same:
        return np.zeros(columns.height, dtype=np.intp)
    families = columns.select(same).unique(maintain_order=True).with_row_index("family")
    return columns.join(families, on=same, how="left", nulls_equal=True, maintain_order="left")[
        "family"
    ].to_numpy()


def _series(name: str, figure: Any) -> pl.Series:
    series = pl.Series(name, np.asarray(figure))
    if series.dtype == pl.Boolean:
        return series
    return series.fill_nan(None) if series.dtype.is_float() else series.cast(pl.Int64)


def _outcome(columns: Sequence[str], settings: ContrastSettings) -> pl.Expr:
    different = pl.col("q") <= settings.alpha
    different = (different & ((pl.col("low") > 0) | (pl.col("high") < 0))).fill_null(False)
    small = pl.lit(False)
    if "q_equivalence" in columns:
        small = (pl.col("q_equivalence") <= settings.alpha).fill_null(False)
    return (
        pl.when(different & small)
        .then(pl.lit(OUTCOMES[1]))
        .when(different)
        .then(pl.lit(OUTCOMES[0]))
        .when(small)
        .then(pl.lit(OUTCOMES[2]))
        .otherwise(pl.lit(OUTCOMES[3]))
        .alias("outcome")
    )


def _unreliable_note() -> pl.Expr:
    """The reason why an interval is unreliable."""
    few_informative = pl.format(
        "unreliable interval: only {} of {} units differ from the most common value, so p cannot "
        "be below {}; use more prompts",
        "informative",
        "units",
        pl.col("min_p").round_sig_figs(2),
    )
    return (
        pl.when((pl.col("informative") < MINIMUM) & pl.col("paired"))
        .then(few_informative)
        .when(pl.col("informative") < MINIMUM)
        .then(pl.lit("unreliable interval: most units of a side have the same value; use more"))
        .when(pl.col("skew").abs() > SKEWED)
        .then(pl.lit("unreliable interval: a few extreme prompts decide it; use more prompts"))
        .otherwise(pl.lit("unreliable interval: BCa and Student's t disagree; use more prompts"))
    )


def _note(warnings: list[str]) -> pl.Expr:
    few = pl.col("units") < MINIMUM
    constant = (pl.col("n") > 1) & (pl.col("effect").is_null())
    parts = [
        pl.col("unpaired"),
        pl.col("unlike"),
        pl.when(few).then(
            pl.format(
                "no interval and no p-value: {} units; fewer than 6 cannot reach p < 0.05",
                "units",
            )
        ),
        pl.when(pl.col("left_out") > 0).then(
            pl.format("{} prompts without a value left out", "left_out")
        ),
        pl.when(constant & ~few).then(
            pl.lit(
                "all differences are equal, so there is no interval and no standardised effect, "
                "and p is 1"
            )
        ),
        pl.when(pl.col("unreliable")).then(_unreliable_note()),
        pl.when(pl.col("ratio").is_null() & (pl.col("n") > 0)).then(
            pl.lit("no ratio: a mean is not above 0")
        ),
        *(pl.lit(warning) for warning in warnings),
    ]
    return pl.concat_str(parts, separator="; ", ignore_nulls=True).alias("note")
