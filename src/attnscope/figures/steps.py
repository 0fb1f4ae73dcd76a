"""Attention step by step while a model answers: to each region, in the query of every new token.

Drawn from `step_mass`. This module must not know how it is measured.
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
    return curves(frame, style, x="step", x_title="New token", y_title="Mass")


def _numbers(request: Request) -> FigureNumbers[SeriesContext]:
    rows = request.run.values.filter(pl.col("measure") == "step_mass")
    step = pl.col("target").cast(pl.Int64).alias("step")
    return series_numbers(request, rows.with_columns(step), "step_mass", "step")


def _text(numbers: FigureNumbers[SeriesContext], request: Request) -> FigureText:
    selection, lines, width = numbers.context
    bins = f" (bins of {width}, by their first)" if width > 1 else ""
    return series_text(
        *(numbers, request, selection, lines, "mean over layers and all heads"),
        "Mass of the keys in the one query that a new token is predicted from, not normalised "
        f"further; queries: {selection.queries}; condition: {', '.join(selection.conditions)}",
        x=("step", "new token {}"),
        late=f"{bins}; later tokens are of longer answers alone",
        why=" (answers that were over)",
        title="Attention while the model answers, token by token",
        overview=f"Lines over the tokens of the answer, one for each of {join(lines)}.",
        axes=[f"x: new token{bins}, from 1", "y: mass"],
        quantity="mass",
        no_differences="Values by token, not differences.",
    )


FIGURE = Figure(
    name="steps",
    shows="mass of regions or classes over the tokens of an answer",
    needs="an experiment with `step_mass` among its measures has it",
    numbers=_numbers,
    chart=_chart,
    text=_text,
)
