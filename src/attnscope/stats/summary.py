"""Computes means over prompts with their confidence intervals, for figures."""

from collections.abc import Sequence

import numpy as np
import polars as pl

from attnscope.measures.measure import ANY, Range
from attnscope.stats.arrays import mean_of
from attnscope.stats.intervals import intervals
from attnscope.stats.resampling import ResamplingUnits
from attnscope.stats.tables import IDENTITY, Values, matrix
from attnscope.stats.units import units


def summary(
    values: Values,
    by: Sequence[str] = IDENTITY,
    *,
    prompts: pl.DataFrame | None = None,
    cluster: str | Sequence[str] | None = None,
    strata: str | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
    within: Range = ANY,
) -> pl.DataFrame:
    """One row per combination of `by`: mean over prompts, its interval (low, high), how many
    prompts have a value (n), how many units they are, and whether the interval is unreliable.

    low and high are null for fewer than 6 units, and if all values are equal. `prompts`,
    `cluster` and `strata` are as in `compare`. `within` are the possible values
    (`tables.possible`): an interval ends there.
    """
    table = matrix(values, by)
    sample = units(table.x, **ResamplingUnits(prompts, cluster, strata).labels(table.prompts))
    interval = intervals(
        sample.x,
        degrees=sample.degrees,
        informative=sample.informative,
        level=level,
        resamples=resamples,
        seed=seed,
    )
    return table.columns.with_columns(
        pl.Series("mean", mean_of(table.x)).fill_nan(None),
        pl.Series("low", np.clip(interval.low, *within)).fill_nan(None),
        pl.Series("high", np.clip(interval.high, *within)).fill_nan(None),
        pl.Series("n", (~np.isnan(table.x)).sum(0).astype(np.int64)),
        pl.Series("units", sample.n.astype(np.int64)),
        pl.Series("unreliable", interval.unreliable),
    )
