"""Flow: the attention from queries of one class to keys of another, as a matrix."""

from dataclasses import replace

import polars as pl

from attnscope.figures.figure import Figure
from attnscope.figures.options import COMBINE
from attnscope.figures.reading import Rows
from attnscope.figures.select import in_order_of
from attnscope.figures.shapes.matrix import Matrix
from attnscope.figures.text_format import join


def _without_empty_columns(rows: Rows) -> Rows:
    """A class that receives exactly 0 from every query has no keys here: drop its column."""
    most = dict(rows.values.group_by("target").agg(pl.col("value").abs().max()).iter_rows())
    empty = [name for name, value in most.items() if value == 0]
    if rows.request.choice.items is not None or not empty or len(empty) == len(most):
        return rows
    names = join(in_order_of(rows.selection.items, empty))
    return replace(
        rows,
        values=rows.values.filter(~pl.col("target").is_in(empty)),
        sentences=[f"No column for {names}: no attention goes there"],
    )


FIGURE = Figure(
    name="flow",
    shows="attention from class to class, a matrix",
    measures=["flow"],
    layers=lambda layers: sorted({layers[0], layers[-1]}),
    by=["model", "layer", "from", "to"],
    shape=Matrix(
        panel_of=["model", "layer"],
        x="to",
        down="from",
        x_title="to (keys)",
        down_title="from (queries)",
        y="Mass",
        scale="shared",
        from_zero=True,
        numbers=8,
    ),
    change=_without_empty_columns,
    title="Attention from each token class to each token class",
    what="Each cell is the flow from the queries of a class (row) to the keys of a class (column): "
    "mean attention over these queries",
    quantity="flow",
    undefined=" (a class without queries)",
    options=COMBINE,
)
