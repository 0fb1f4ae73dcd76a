"""How well one factor explains a head's fall, token by token: R² of λ's line through the origin,
from the attention profiles of a run that kept them.
"""

import polars as pl

from attnscope.experiment.tables import VALUES

__all__ = ["one_factor"]


def one_factor(positions: pl.LazyFrame, tokens: pl.LazyFrame, base: str) -> pl.DataFrame:
    """Rows of `values` with the measure `lambda_r2`, for every condition but the base.

    1 less the squared error of `variant ≈ λ · base` over the variant's variation about its mean,
    over the aligned tokens that have an average on both sides. Below 0 where a constant would do
    better than any factor; null where the variant does not vary.
    """
    cell = ["model", "prompt", "queries", "layer", "head"]
    aligned = tokens.filter(pl.col("twin").is_not_null()).select(
        "model", "prompt", "condition", "position", "twin"
    )
    old = positions.filter(pl.col("condition") == base).select(
        *cell, pl.col("position").alias("twin"), pl.col("average").cast(pl.Float64).alias("x")
    )
    new = positions.filter(pl.col("condition") != base).join(
        aligned, on=["model", "prompt", "condition", "position"]
    )
    both = (
        new.with_columns(pl.col("average").cast(pl.Float64).alias("y"))
        .join(old, on=[*cell, "twin"])
        .filter(pl.col("x").is_finite() & pl.col("y").is_finite())
    )
    x, y = pl.col("x"), pl.col("y")
    slope = (x * y).sum() / (x * x).sum()
    left = (y - slope * x).pow(2).sum()
    all_of_it = (y - y.mean()).pow(2).sum()
    fits = both.group_by([*cell, "condition"], maintain_order=True).agg(
        pl.when(all_of_it > 0).then(1 - left / all_of_it).alias("value"),
        pl.len().cast(pl.Float64).alias("tokens"),
    )
    blank = [
        pl.lit(None, dtype=VALUES[name]).alias(name)
        for name in ("classes", "item", "target", "uniform")
    ]
    named = fits.with_columns(
        *blank, pl.lit("all").alias("keys"), pl.lit("lambda_r2").alias("measure")
    )
    return named.select(VALUES.names()).collect()
