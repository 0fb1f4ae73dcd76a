"""Means over prompts with their intervals: the numbers under a bar or a line."""

from collections.abc import Sequence

import numpy as np
import polars as pl

from attnscope.stats.resample import bca
from attnscope.stats.tables import IDENTITY, Values, matrix

__all__ = ["summary"]


def summary(
    values: Values,
    by: Sequence[str] = IDENTITY,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> pl.DataFrame:
    """One row per combination of `by`: mean over prompts, BCa interval (low, high) and n.

    n counts the prompts with a value; low and high are null for fewer than two.
    """
    made = matrix(values, by)
    low, high = bca(made.x, level=level, resamples=resamples, seed=seed)
    n = (~np.isnan(made.x)).sum(0)
    mean = np.where(n > 0, np.nansum(made.x, 0) / np.maximum(n, 1), np.nan)
    return made.columns.with_columns(
        pl.Series("mean", mean).fill_nan(None),
        pl.Series("low", low).fill_nan(None),
        pl.Series("high", high).fill_nan(None),
        pl.Series("n", n.astype(np.int64)),
    )
