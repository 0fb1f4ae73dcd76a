"""Two models, or two conditions, compared prompt by prompt: for every layer, head and measure at
once, with effect sizes, intervals, permutation tests and the correction for their number.
"""

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from attnscope.errors import InputError, unknown
from attnscope.stats import resample, tables
from attnscope.stats.tables import Matrix, Values, matrix, ranges

__all__ = ["MINIMUM", "compare", "paired_figures"]

MINIMUM = 6
"""Prompts that a p-value needs: of 5 signs, the rarest pattern and its opposite have p = 0.0625."""

Floats = NDArray[np.float64]


def compare(
    values: Values,
    *,
    over: str = "model",
    pair: tuple[str, str] | None = None,
    combine: str = "each",
    normalise: str = "mass",
    paired: bool | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> pl.DataFrame:
    """The second of a pair against the first: one row per layer, head and thing measured.

    over        what differs, "model" or "condition"; the other is held fixed, row by row
    pair        first and second; needed where there are more than two
    combine     heads by "mean", "sum" or "max", or "each" by itself
    normalise   of masses: "mass", "per-token", "share" or "lift"
    paired      by prompt (True) or as two independent groups (False); by default paired, unless
                the two have no prompt in common

    | column | |
    | --- | --- |
    | n, n_a, n_b | prompts: pairs, or those of each side |
    | mean_a, mean_b, difference, ratio | means over those prompts; second less first, over first |
    | effect | difference over the standard deviation of the paired differences (unpaired: pooled) |
    | low, high | BCa interval of the difference |
    | p, q | sign-flip (unpaired: relabelling) test; q over layers × heads of the same thing |
    | paired, note | how it was compared, and what to know about this row |
    """
    if over not in ("model", "condition"):
        raise unknown("comparison over", over, ("model", "condition"))
    first, second = _pair(values, over, pair)
    held = "condition" if over == "model" else "model"
    by = [held, "queries", "keys", "classes", "measure", "item", "target", "layer", "head"]
    table = values.lazy().filter(pl.col(over).is_in([first, second])).collect()
    table = tables.normalise(tables.combine(table, combine), normalise)
    sides = (table.filter(pl.col(over) == first), table.filter(pl.col(over) == second))
    if paired is None:
        paired = not _disjoint(sides)
    if paired:
        _no_orphans(sides, (first, second), over, held)
    # What only one side has (pair measures, which the base lacks) is not compared.
    has = [side.select(by).unique() for side in sides]
    sides = (
        sides[0].join(has[1], on=by, how="semi", nulls_equal=True),
        sides[1].join(has[0], on=by, how="semi", nulls_equal=True),
    )
    if sides[0].is_empty():
        raise InputError(f"{over}s {first!r} and {second!r} have no measured quantity in common")
    prompts = [None, None] if not paired else [sorted(sides[0]["prompt"].unique())] * 2
    a, b = (matrix(side, by, of) for side, of in zip(sides, prompts, strict=True))
    settings: dict[str, Any] = {"level": level, "resamples": resamples, "seed": seed}
    figures = paired_figures(a, b, by, settings) if paired else _unpaired(a, b, by, settings)
    label = pl.when(pl.col("measure") == "mass").then(pl.lit(normalise)).alias("normalise")
    made = a.columns.with_columns(
        label,
        pl.lit(combine).alias("combine"),
        pl.lit(first).alias("a"),
        pl.lit(second).alias("b"),
        *(_series(name, figure) for name, figure in figures.items()),
        pl.lit(paired).alias("paired"),
    )
    order = ["a", "b", *by[:5], "normalise", *by[5:7], "combine", *by[7:], *figures, "paired"]
    made = made.select(order).sort(by, nulls_last=False)
    return made.with_columns(_note(over, first, second))


def _pair(values: Values, over: str, pair: tuple[str, str] | None) -> tuple[str, str]:
    there: list[str] = (
        values.lazy().select(pl.col(over).unique(maintain_order=True)).collect()[over].to_list()
    )
    if pair is None:
        if len(there) != 2:
            raise InputError(
                f"a pair of {over}s is compared, and here are {len(there)}: {', '.join(there)}; "
                "say which two"
            )
        return there[0], there[1]
    for name in pair:
        if name not in there:
            raise unknown(over, name, there)
    if pair[0] == pair[1]:
        raise InputError(f"{over} {pair[0]!r} cannot be compared with itself")
    return pair


def _disjoint(sides: tuple[pl.DataFrame, pl.DataFrame]) -> bool:
    a, b = (set(side["prompt"]) for side in sides)
    return not a & b


def _no_orphans(
    sides: tuple[pl.DataFrame, pl.DataFrame], pair: tuple[str, str], over: str, held: str
) -> None:
    """Every prompt of one side has its partner on the other."""
    there = [set(side.select(held, "prompt").unique().iter_rows()) for side in sides]
    wrong = []
    for at, name in enumerate(pair):
        for kind in sorted({kind for kind, _ in there[at] - there[1 - at]}):
            alone = [prompt for k, prompt in there[at] - there[1 - at] if k == kind]
            wrong.append(f"{over} {name!r} alone has, of {held} {kind!r}, prompts {ranges(alone)}")
    if wrong:
        raise InputError(
            f"{'; '.join(wrong)}. A paired comparison needs both of every prompt: finish the run, "
            "leave these prompts out, or compare as independent groups with paired=False"
        )


def paired_figures(a: Matrix, b: Matrix, by: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """What `compare` says of matrices with the same prompts and columns, as arrays."""
    d = b.x - a.x
    both = ~np.isnan(d)
    n = both.sum(0)
    mean_a, mean_b = (_mean(np.where(both, side.x, np.nan)) for side in (a, b))
    scale = np.where(both, np.maximum(np.abs(a.x), np.abs(b.x)), 0.0).max(0, initial=0.0)
    d = _without_rounding(d, scale)
    difference, spread = _mean(d), _spread(d, 1)
    low, high = resample.bca(d, **settings)
    flips = _flips(a.columns, by, settings["resamples"])
    p = resample.sign_flip(d, resamples=flips, seed=settings["seed"])
    p = np.where(n >= MINIMUM, p, np.nan)
    return {
        "n": n,
        "n_a": n,
        "n_b": n,
        **_figures(mean_a, mean_b, difference, spread),
        "low": low,
        "high": high,
        "p": p,
        "q": _corrected(a.columns, by, p),
        "left_out": len(a.prompts) - n,
    }


def _unpaired(a: Matrix, b: Matrix, by: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    n_a, n_b = ((~np.isnan(side.x)).sum(0) for side in (a, b))
    mean_a, mean_b = _mean(a.x), _mean(b.x)
    degrees = n_a + n_b - 2
    squares = sum(np.nan_to_num(_spread(m.x, 0)) ** 2 * k for m, k in ((a, n_a), (b, n_b)))
    pooled = np.sqrt(np.where(degrees > 0, squares / np.maximum(degrees, 1), np.nan))
    low, high = resample.bca_unpaired(a.x, b.x, **settings)
    flips = _flips(a.columns, by, settings["resamples"])
    p = resample.relabel(a.x, b.x, resamples=flips, seed=settings["seed"])
    p = np.where(np.minimum(n_a, n_b) >= MINIMUM, p, np.nan)
    return {
        "n": n_a + n_b,
        "n_a": n_a,
        "n_b": n_b,
        **_figures(mean_a, mean_b, mean_b - mean_a, pooled),
        "low": low,
        "high": high,
        "p": p,
        "q": _corrected(a.columns, by, p),
        "left_out": len(a.prompts) + len(b.prompts) - n_a - n_b,
    }


def _figures(
    mean_a: Floats, mean_b: Floats, difference: Floats, spread: Floats
) -> dict[str, Floats]:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(mean_a != 0, mean_b / mean_a, np.nan)
        effect = np.where(spread > 0, difference / spread, np.nan)
    return {
        "mean_a": mean_a,
        "mean_b": mean_b,
        "difference": difference,
        "ratio": ratio,
        "effect": effect,
    }


def _without_rounding(d: Floats, scale: Floats) -> Floats:
    """Differences that are all one number but for float64 rounding become that number."""
    middle = _mean(d)
    middle = np.where(np.abs(middle) <= 1e-14 * scale, 0.0, middle)
    apart = np.where(np.isnan(d), 0.0, np.abs(d - middle)).max(0, initial=0.0)
    return np.where((apart <= 1e-14 * scale) & ~np.isnan(d), middle, d)


def _mean(x: Floats) -> Floats:
    n = (~np.isnan(x)).sum(0)
    return np.where(n > 0, np.nansum(x, 0) / np.maximum(n, 1), np.nan)


def _spread(x: Floats, less: int) -> Floats:
    """Standard deviation over n - `less`; exactly 0 where all values are one."""
    known = ~np.isnan(x)
    n = known.sum(0)
    spread = np.sqrt(np.nansum((x - _mean(x)) ** 2, 0) / np.maximum(n - less, 1))
    least, most = np.where(known, x, np.inf).min(0), np.where(known, x, -np.inf).max(0)
    return np.where(n > less, np.where(least == most, 0.0, spread), np.nan)


def _family(columns: pl.DataFrame, by: list[str]) -> NDArray[Any]:
    """Which tests are corrected together: all layers and heads of the same thing."""
    same = [name for name in by if name not in ("layer", "head")]
    if not same:
        return np.zeros(columns.height, dtype=np.intp)
    families = columns.select(same).unique(maintain_order=True).with_row_index("family")
    return columns.join(families, on=same, how="left", nulls_equal=True)["family"].to_numpy()


def _flips(columns: pl.DataFrame, by: list[str], resamples: int) -> int:
    """Enough that one head alone can pass the correction: the least p is half of 0.05 / tests."""
    return max(resamples, 40 * int(np.bincount(_family(columns, by)).max(initial=1)))


def _corrected(columns: pl.DataFrame, by: list[str], p: Floats) -> Floats:
    family = _family(columns, by)
    q = np.full(len(p), np.nan)
    for number in np.unique(family):
        q[family == number] = resample.false_discovery(p[family == number])
    return q


def _series(name: str, figure: Any) -> pl.Series:
    series = pl.Series(name, np.asarray(figure))
    return series.fill_nan(None) if series.dtype.is_float() else series.cast(pl.Int64)


def _note(over: str, first: str, second: str) -> pl.Expr:
    few = (pl.col("n_a") < MINIMUM) | (pl.col("n_b") < MINIMUM)
    why = pl.format(
        "no p-value: {} prompts, and fewer than 6 cannot reach p < 0.05 whatever they show",
        pl.min_horizontal("n_a", "n_b"),
    )
    parts = [
        pl.when(~pl.col("paired")).then(
            pl.lit(f"unpaired: {over}s {first} and {second} were measured on different prompts")
        ),
        pl.when(few).then(why),
        pl.when(pl.col("left_out") > 0).then(
            pl.format("{} prompts without a value left out", "left_out")
        ),
        pl.when((pl.col("n") > 1) & pl.col("effect").is_null()).then(
            pl.lit("constant: the differences do not vary, so there is no standardised effect")
        ),
    ]
    return pl.concat_str(parts, separator="; ", ignore_nulls=True).alias("note")
