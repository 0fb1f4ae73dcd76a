"""Attention step by step while a model answers: to each region, in the query of every new token.

Drawn from `step_mass`. This module must not know how it is measured.
"""

from typing import Any

import polars as pl

from attnscope.figures.charts.lines import curves
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Request
from attnscope.figures.series import Along, along, along_words
from attnscope.figures.text_format import join
from attnscope.figures.theme import Style


def _chart(frame: pl.DataFrame, style: Style) -> Any:
    """`value` with `low` and `high` over `step`, a line per `series`, a panel per `panel`."""
    return curves(frame, style, x="step", x_title="New token", y_title="Mass")


def _numbers(asked: Request) -> FigureNumbers[Along]:
    rows = asked.run.values.filter(pl.col("measure") == "step_mass")
    step = pl.col("target").cast(pl.Int64).alias("step")
    return along(asked, rows.with_columns(step), "step_mass", "step")


def _words(made: FigureNumbers[Along], asked: Request) -> FigureText:
    found, lines, width = made.told
    bins = f" (bins of {width}, by their first)" if width > 1 else ""
    return along_words(
        *(made, asked, found, lines, "mean over layers and all heads"),
        "Mass of the keys in the one query that a new token is predicted from, not normalised "
        f"further; queries: {found.queries}; condition: {', '.join(found.conditions)}",
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
    words=_words,
)
