"""Draws per-query values over the positions of the text or over the tokens of the completion.

Drawn from `by_query`.
"""

from dataclasses import replace
from typing import Any

import polars as pl

from attnscope.figures.charts.lines import curves
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Option, Request
from attnscope.figures.select import AbsentError
from attnscope.figures.series import SeriesContext, series_numbers, series_text
from attnscope.figures.text_format import join
from attnscope.figures.theme import Style

MEASURES = {
    "query_mass": "Mass",
    "query_weight": "Attention weight",
    "query_entropy": "Entropy (nats)",
}
"""Measures that can be drawn, with the title of the axis."""
ALONG = {"text": "Position of the query", "answer": "Generated token"}


def _chart(
    frame: pl.DataFrame, style: Style, *, x_title: str = ALONG["text"], y_title: str = "Value"
) -> Any:
    """`value` with `low` and `high` over `position`, a line per `series`, a panel per `panel`."""
    return curves(frame, style, x="position", x_title=x_title, y_title=y_title)


def _numbers(request: Request) -> FigureNumbers[SeriesContext]:
    measure = _measure(request)
    table = request.run.by_query.filter(pl.col("measure") == measure)
    if request.options["along"] == "answer":
        table = _along_answers(request, table)
    numbers = series_numbers(request, table, measure, "position")
    titles = {"x_title": _across(request, _size(request, numbers)), "y_title": MEASURES[measure]}
    return replace(numbers, settings=titles)


def _measure(request: Request) -> str:
    """The chosen measure, or the first that the run has."""
    measures = (
        request.run.by_query.select(pl.col("measure").unique()).collect()["measure"].to_list()
    )
    available = [m for m in MEASURES if m in measures]
    measure = request.options["measure"]
    if measure is None and available:
        return available[0]
    if measure not in available:
        raise AbsentError(f"this run has no {measure or 'per-query values'}", missing=[measure])
    return str(measure)


def _along_answers(request: Request, table: pl.LazyFrame) -> pl.LazyFrame:
    """The queries that predicted the generated tokens, numbered by those tokens from 1."""
    if request.run.experiment.bin > 1:
        raise AbsentError(
            f"this run has bins of {request.run.experiment.bin} queries, so there is no value per "
            "generated token",
            code="binned-queries",
            bin=request.run.experiment.bin,
        )
    cells = request.run.cells.lazy().select(
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


def _size(request: Request, numbers: FigureNumbers[SeriesContext]) -> int:
    """Number of positions that one point of a line averages."""
    *_, width = numbers.context
    return max(width, request.run.experiment.bin)


def _across(request: Request, size: int) -> str:
    bins = f" (first of each bin of {size})" if size > 1 else ""
    return ALONG[request.options["along"]] + bins


def _text(numbers: FigureNumbers[SeriesContext], request: Request) -> FigureText:
    selection, lines, _ = numbers.context
    answers = request.options["along"] == "answer"
    what = numbers.settings["y_title"]
    size = _size(request, numbers)
    across = _across(request, size).lower()
    binned = f", means over {size} positions" if size > 1 else ""
    return series_text(
        *(numbers, request, selection, lines, "mean over layers and heads"),
        f"{what} per query{binned}, raw values; queries: {selection.queries}; "
        f"condition: {', '.join(selection.conditions)}",
        x=("position", "generated token {}" if answers else "position {}"),
        late=f"; late positions exist only in the longer {'completions' if answers else 'texts'}",
        title=f"{what.partition(' (')[0]} of each query, "
        + ("by generated token" if answers else "by position in the text"),
        overview=f"Lines over {across}, one for each of {join(lines)}.",
        axes=[f"x: {across}, from {1 if answers else 0}", f"y: {what.lower()}"],
        quantity=what.lower(),
        no_differences="The figure shows values; differences are not tested.",
    )


FIGURE = Figure(
    name="by-query",
    shows="per-query mass, weight or entropy over the text or over the completion",
    needs="an experiment with `query_mass`, `query_weight` or `query_entropy` has them",
    numbers=_numbers,
    chart=_chart,
    text=_text,
    options={
        "measure": Option(
            help="`measure`: query_mass, query_weight or query_entropy; default: the first in "
            "the run",
            known=(None, *MEASURES),
        ),
        "along": Option(
            help="`along`: text (default) or answer (the completion)", known=tuple(ALONG)
        ),
    },
)
