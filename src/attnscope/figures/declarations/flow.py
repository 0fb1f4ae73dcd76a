"""Flow: the attention from queries of one class to keys of another, as a matrix."""

from attnscope.figures.figure import Figure
from attnscope.figures.options import COMBINE
from attnscope.figures.reading import Rows, without_zeros
from attnscope.figures.shapes.matrix import Matrix


def _without_empty_columns(rows: Rows) -> Rows:
    return without_zeros(rows, "target", "column")


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
