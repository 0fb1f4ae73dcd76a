"""Computes means over prompts with their confidence intervals, for figures."""

from collections.abc import Sequence

import polars as pl

from attnscope.measures.measure import ANY, Range
from attnscope.run.tables import IDENTITY, Values, matrix
from attnscope.stats.means import one_sample
from attnscope.stats.resampling import ResamplingUnits


def summary(
    values: Values,
    by: Sequence[str] = IDENTITY,
    *,
    prompts: pl.DataFrame | None = None,
    cluster: str | None = None,
    strata: str | None = None,
    within: Range = ANY,
) -> pl.DataFrame:
    """One row per combination of `by`: mean over prompts, its 95 % interval (low, high), how
    many prompts have a value (n), and how many units they are.

    low and high are null for fewer than 6 informative units. `prompts`, `cluster` and `strata` are
    as in `compare`. `within` are the possible values (`tables.possible`): an interval ends there.
    """
    table = matrix(values, by)
    labels = ResamplingUnits(prompts, cluster, strata).labels(table.prompts)
    tested = one_sample(table.x, **labels, within=within)
    low, high = tested.interval()
    known = {"mean": tested.estimate, "low": low, "high": high}
    return table.columns.with_columns(
        *(pl.Series(name, figure).fill_nan(None) for name, figure in known.items()),
        pl.Series("n", (table.x == table.x).sum(0), dtype=pl.Int64),  # nan differs from itself
        pl.Series("units", tested.units, dtype=pl.Int64),
    )
