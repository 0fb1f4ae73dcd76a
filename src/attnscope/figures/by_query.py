"""What single queries look at, over their places in the text, or over the tokens of an answer.

Drawn from `by_query`. This module must not know how it is measured.
"""

from dataclasses import replace
from typing import Any

import polars as pl

from attnscope.figures.charts.lines import curves
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Option, Request
from attnscope.figures.select import AbsentError
from attnscope.figures.series import Along, along, along_words
from attnscope.figures.text_format import join
from attnscope.figures.theme import Style

MEASURES = {
    "query_mass": "Mass",
    "query_weight": "Attention weight",
    "query_entropy": "Entropy (nats)",
}
"""What can be shown, with the name of its axis."""
ALONG = {"text": "Position of the query", "answer": "New token"}


def _chart(
    frame: pl.DataFrame, style: Style, *, x_title: str = ALONG["text"], y_title: str = "Value"
) -> Any:
    """`value` with `low` and `high` over `position`, a line per `series`, a panel per `panel`."""
    return curves(frame, style, x="position", x_title=x_title, y_title=y_title)


def _numbers(asked: Request) -> FigureNumbers[Along]:
    measure = _measure(asked)
    table = asked.run.by_query.filter(pl.col("measure") == measure)
    if asked.options["along"] == "answer":
        table = _along_answers(asked, table)
    made = along(asked, table, measure, "position")
    titles = {"x_title": _across(asked, _size(asked, made)), "y_title": MEASURES[measure]}
    return replace(made, settings=titles)


def _measure(asked: Request) -> str:
    """The one asked for, else the first that the run has."""
    there = asked.run.by_query.select(pl.col("measure").unique()).collect()["measure"].to_list()
    found = [m for m in MEASURES if m in there]
    wanted = asked.options["measure"]
    if wanted is None and found:
        return found[0]
    if wanted not in found:
        raise AbsentError(f"this run has no {wanted or 'per-query values'}", missing=[wanted])
    return str(wanted)


def _along_answers(asked: Request, table: pl.LazyFrame) -> pl.LazyFrame:
    """The queries that new tokens were predicted from, counted by those tokens, from 1."""
    if asked.run.experiment.bin > 1:
        raise AbsentError(
            f"this run has bins of {asked.run.experiment.bin} queries, so there is no value per "
            "generated token",
            code="binned-queries",
            bin=asked.run.experiment.bin,
        )
    cells = asked.run.cells.lazy().select(
        "model", "prompt", "condition", "tokens", "generated_tokens"
    )
    step = pl.col("position") - pl.col("tokens") + pl.col("generated_tokens") + 1
    return (
        table.join(cells, on=["model", "prompt", "condition"], maintain_order="left")
        .filter(pl.col("generated_tokens") > 0)
        .with_columns(step.alias("position"))
        .filter(pl.col("position") >= 1)
        .drop("tokens", "generated_tokens")
    )


def _size(asked: Request, made: FigureNumbers[Along]) -> int:
    """How many positions a point of a line is the mean of."""
    *_, width = made.told
    return max(width, asked.run.experiment.bin)


def _across(asked: Request, size: int) -> str:
    bins = f" (bins of {size}, by their first)" if size > 1 else ""
    return ALONG[asked.options["along"]] + bins


def _words(made: FigureNumbers[Along], asked: Request) -> FigureText:
    found, lines, _ = made.told
    answers = asked.options["along"] == "answer"
    what = made.settings["y_title"]
    size = _size(asked, made)
    across = _across(asked, size).lower()
    binned = f", means over {size} positions" if size > 1 else ""
    return along_words(
        *(made, asked, found, lines, "mean over layers and heads"),
        f"{what} of single queries{binned}, not normalised further; queries: {found.queries}; "
        f"condition: {', '.join(found.conditions)}",
        x=("position", "new token {}" if answers else "position {}"),
        late=f"; later {'tokens are of longer answers' if answers else 'places of longer texts'} "
        "alone",
        title="What single queries look at, "
        + ("token by token of the answer" if answers else "over the text"),
        overview=f"Lines over {across}, one for each of {join(lines)}.",
        axes=[f"x: {across}, from {1 if answers else 0}", f"y: {what.lower()}"],
        quantity=what.lower(),
        no_differences="Values by query, not differences.",
    )


FIGURE = Figure(
    name="by-query",
    shows="mass, weight or entropy of single queries over the text, or over an answer",
    needs="an experiment with `query_mass`, `query_weight` or `query_entropy` has them",
    numbers=_numbers,
    chart=_chart,
    words=_words,
    options={
        "measure": Option(
            said="`measure` query_mass, query_weight, query_entropy", known=(None, *MEASURES)
        ),
        "along": Option(said="`along` text, answer", known=tuple(ALONG)),
    },
)
