"""The largest entries of the residual stream and its median over layers, beside the sink."""

from dataclasses import replace

import polars as pl

from attnscope.figures.figure import Figure
from attnscope.figures.reading import SHOWS_VALUES, Rows
from attnscope.figures.select import AbsentError
from attnscope.figures.shapes.lines import Lines
from attnscope.measures.measure import ANY

SERIES = {
    "residual_largest": "largest",
    "residual_second": "second",
    "residual_third": "third",
    "residual_median": "median of all",
    "first_token": "first-token mass",
}
SIZE, SINK = "size", "sink"


def _in_powers_of_ten(rows: Rows) -> Rows:
    """Sizes as their logarithm to base 10; masses stay as they are."""
    if missing := [m for m in ("residual_largest", "first_token") if m not in rows.measures]:
        raise AbsentError(f"this run has no {' and '.join(missing)}", missing=missing)
    is_sink = pl.col("measure") == "first_token"
    value = pl.when(is_sink).then("value").otherwise(pl.col("value").log10())
    return replace(rows, values=rows.values.with_columns(value=value), within=ANY)


FIGURE = Figure(
    name="massive",
    shows="largest entries and median of the residual stream over layers, beside first-token mass",
    measures=list(SERIES),
    one_model=True,
    derived={
        "panel": pl.when(pl.col("measure") == "first_token")
        .then(pl.lit(SINK))
        .otherwise(pl.lit(SIZE)),
        "series": pl.col("measure").replace_strict(SERIES, default=None),
    },
    by=["panel", "series", "layer"],
    shape=Lines(
        y={SIZE: "Absolute value, as a power of ten", SINK: "First-token mass"}, zero=False
    ),
    change=_in_powers_of_ten,
    sentences=["Residual stream after a layer, over all tokens of a text; attention in a layer"],
    differences=SHOWS_VALUES,
    title="Massive activations and the sink, by layer",
    what="Left: the three largest entries of the residual stream and the median of all; right: "
    "attention to the first token",
    quantity="value",
    needs="an experiment with `residual` and `first_token` among its measures has the numbers",
)
