"""Statistics of figures: means over prompts, intervals, differences; rounded once for all."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any, Literal

import polars as pl

from attnscope.figures.summary import summary
from attnscope.figures.text_format import DIGITS
from attnscope.measures.measure import ANY, Range
from attnscope.stats.paired import compare
from attnscope.stats.resampling import ResamplingUnits

LEVEL = 0.05
"""A difference is significant if q is below this."""

PAIRED = 8
"""Up to this number of models, every two are compared."""

Over = Literal["model", "condition"]


def rounded(frame: pl.DataFrame) -> pl.DataFrame:
    """Round floats to the digits that are shown; NaN becomes null."""
    floats = pl.col(pl.Float64, pl.Float32).cast(pl.Float64)
    # Adding 0.0 turns a minus zero into zero.
    return frame.with_columns(floats.fill_nan(None).round_sig_figs(DIGITS) + 0.0)


def in_order(frame: pl.DataFrame, **orders: Sequence[Any]) -> pl.DataFrame:
    """Sort by the given order of values of each column; the first column counts first, and values
    that are not in the order come last."""
    ranks = [
        pl.col(column).replace_strict(
            list(order), list(range(len(order))), default=len(order), return_dtype=pl.Int32
        )
        for column, order in orders.items()
    ]
    return frame.sort(ranks, maintain_order=True)


def means(
    values: pl.DataFrame, by: Sequence[str], units: ResamplingUnits, within: Range = ANY
) -> pl.DataFrame:
    """Per group: `value`, the mean over prompts, with `low`, `high` and `n`. Intervals
    end at the possible values, `within`."""
    defined = values.filter(pl.col("value").is_not_null())
    table = summary(defined, by=list(by), within=within, **units.settings)
    table = table.rename({"mean": "value"})
    return table.select(*by, "value", "low", "high", "n")


def intervals(frame: pl.DataFrame) -> bool:
    """Whether any row has an interval."""
    return frame["low"].null_count() < frame.height


def differences(
    values: pl.DataFrame,
    over: Over,
    pairs: Sequence[tuple[str, str]],
    places: Sequence[str],
    units: ResamplingUnits,
) -> pl.DataFrame:
    """Differences of pairs of models or conditions, paired by prompt: a row per place.

    Columns: the places, `of`, `minus`, `difference`, `low`, `high`, `n`, `q`, `outcome`, `paired`.
    """
    columns = ["of", "minus", "difference", "low", "high", "n", "q", "outcome", "paired"]
    defined = values.filter(pl.col("value").is_not_null())
    parts = [
        compare(defined, over=over, pair=(minus, of), **units.settings)
        .with_columns(pl.lit(of).alias("of"), pl.lit(minus).alias("minus"))
        .select(*places, *columns)
        for of, minus in pairs
    ]
    return rounded(pl.concat(parts))


def between_models(
    values: pl.DataFrame, models: Sequence[str], units: ResamplingUnits, **places: Sequence[Any]
) -> pl.DataFrame | None:
    """Differences of every two models, the later minus the earlier; None for one model.

    With more than `PAIRED` models, each is compared with the first only: all pairs would be slow
    and too many to read.
    """
    pairs = [(b, a) for a, b in combinations(models, 2) if len(models) <= PAIRED or a == models[0]]
    if not pairs:
        return None
    return in_order(differences(values, "model", pairs, list(places), units), **places)
