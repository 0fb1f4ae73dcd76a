"""Bins profiles that have more positions than a page can show: mean, minimum and maximum.

A bin hides no spike, because its minimum and maximum are drawn as a band.
"""

from collections.abc import Sequence

import polars as pl

PRINT = 600
"""Largest number of positions per panel in print; more are binned."""
FINE = 8_000
"""The same for the screen, where readers can zoom."""


def binned(frame: pl.DataFrame, limit: int, *, by: Sequence[str]) -> tuple[pl.DataFrame, int]:
    """At most `limit` equal bins over `position` per group, and the bin width in tokens.

    Adds `last` (the last position of the bin), `min`, `max` and `tokens`. Without binning, each
    position is a bin of one token.
    """
    if frame.is_empty():
        width = 1
    else:
        first, last = frame["position"].min(), frame["position"].max()
        assert isinstance(first, int)
        assert isinstance(last, int)
        width = max(1, -(-(last - first + 1) // limit))
    if width == 1:
        return frame.with_columns(
            pl.col("position").alias("last"),
            pl.col("value").alias("min"),
            pl.col("value").alias("max"),
            pl.col("value").is_not_null().cast(pl.Int32).alias("tokens"),
        ), 1
    others = [c for c in frame.columns if c not in {*by, "position", "value"}]
    return (
        frame.with_columns((pl.col("position") - first) // width)
        .group_by([*by, "position"], maintain_order=True)
        .agg(
            pl.col("value").mean(),
            pl.col("value").min().alias("min"),
            pl.col("value").max().alias("max"),
            pl.col("value").count().cast(pl.Int32).alias("tokens"),
            *[pl.col(c).first() for c in others],
        )
        .with_columns((pl.col("position") * width + first).cast(pl.Int32))
        .with_columns(
            pl.min_horizontal(pl.col("position") + (width - 1), pl.lit(last))
            .cast(pl.Int32)
            .alias("last")
        )
        .select(*frame.columns, "last", "min", "max", "tokens")
    ), width
