"""The attention to each region at each generated token."""

import polars as pl

from attnscope.figures.figure import Figure
from attnscope.figures.reading import SHOWS_VALUES, label
from attnscope.figures.shapes.lines import Lines

FIGURE = Figure(
    name="steps",
    shows="mass of regions or classes over the tokens of the completion",
    measures=["step_mass"],
    all_of="keys",
    pooled=True,
    derived={
        "panel": "model",
        "series": label("keys?", "thing?"),
        "step": pl.col("target").cast(pl.Int64),
    },
    by=["panel", "series", "step"],
    shape=Lines(x="step", x_title="Generated token", y="Mass"),
    sentences=["Late positions exist only in the longer completions"],
    differences=SHOWS_VALUES,
    title="Attention during generation, by generated token",
    what="Lines are the mass of each region in the attention row of the query that predicts a "
    "generated token",
    quantity="mass",
    undefined=" (completions that had ended)",
)
