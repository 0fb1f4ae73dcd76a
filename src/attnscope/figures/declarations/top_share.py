"""The share of the attention that the most attended keys receive, by the share of the keys."""

from dataclasses import replace

import polars as pl

from attnscope.figures.figure import Figure
from attnscope.figures.reading import SHOWS_VALUES, Rows
from attnscope.figures.shapes.lines import Lines


def _beside_uniform(rows: Rows) -> Rows:
    """The measured value and that of uniform attention as rows of their own."""
    values = rows.values.rename({"value": "measured"})
    index = [c for c in values.columns if c not in ("measured", "uniform")]
    values = values.unpivot(["measured", "uniform"], index=index, variable_name="series")
    return replace(rows, values=values)


FIGURE = Figure(
    name="top-share",
    shows="share of the attention that the most attended keys receive, beside uniform attention",
    measures=["top_share"],
    pooled=True,
    change=_beside_uniform,
    derived={"panel": "model", "share": pl.col("item").cast(pl.Float64)},
    by=["panel", "series", "share"],
    shape=Lines(x="share", x_title="Share of the keys", y="Share of the attention"),
    sentences=["Keys in the order of what they receive, from the largest, in each head"],
    differences=SHOWS_VALUES,
    title="Attention to the most attended keys",
    what="Lines are the share of all attention that the most attended keys receive, as measured "
    "and if attention were uniform",
    quantity="share of the attention",
)
