"""Draws the attention to each region at each generated token.

Drawn from `step_mass`.
"""

from typing import Any

import polars as pl

from attnscope.figures.charts.lines import curves
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Request
from attnscope.figures.series import SeriesContext, series_numbers, series_text
from attnscope.figures.text_format import join
from attnscope.figures.theme import Style


def _chart(frame: pl.DataFrame, style: Style) -> Any:
    """`value` with `low` and `high` over `step`, a line per `series`, a panel per `panel`."""
    return curves(frame, style, x="step", x_title="Generated token", y_title="Mass")


def _numbers(request: Request) -> FigureNumbers[SeriesContext]:
    rows = request.run.values.filter(pl.col("measure") == "step_mass")
    step = pl.col("target").cast(pl.Int64).alias("step")
    return series_numbers(request, rows.with_columns(step), "step_mass", "step")


def _text(numbers: FigureNumbers[SeriesContext], request: Request) -> FigureText:
    selection, lines, width = numbers.context
    bins = f" (first of each bin of {width})" if width > 1 else ""
    return series_text(
        *(numbers, request, selection, lines, "mean over layers and all heads"),
        "Lines are the mass of each region in the attention row of the query that predicts a "
        "generated token",
        f"Raw values; queries: {selection.queries}; condition: {', '.join(selection.conditions)}",
        x=("step", "generated token {}"),
        late=f"{bins}; late positions exist only in the longer completions",
        why=" (completions that had ended)",
        title="Attention during generation, by generated token",
        overview=f"Lines over the tokens of the completion, one for each of {join(lines)}.",
        axes=[f"x: generated token{bins}, from 1", "y: mass"],
        quantity="mass",
        no_differences="The figure shows values; differences are not tested.",
    )


FIGURE = Figure(
    name="steps",
    shows="mass of regions or classes over the tokens of the completion",
    needs="an experiment with `step_mass` among its measures has it",
    numbers=_numbers,
    chart=_chart,
    text=_text,
)
