"""Draws flow: the attention from queries of one class to keys of another, as a matrix.

Drawn from `flow`.
"""

from typing import Any

import polars as pl

from attnscope.figures.caption import omissions, prompts_text, scope_text, settings_text
from attnscope.figures.charts.matrix import matrices
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import COMBINE, Figure, FigureNumbers, Request
from attnscope.figures.numbers import between_models, in_order, means, rounded
from attnscope.figures.select import ValueRows, select
from attnscope.figures.text_format import join
from attnscope.figures.theme import Style
from attnscope.stats.tables import combine, possible

WRITTEN = 8
"""Largest number of classes for which cells show their numbers."""


Context = tuple[ValueRows, int, list[str]]
"""The rows; how many layers the run has; classes that receive exactly 0."""


def _chart(frame: pl.DataFrame, style: Style) -> Any:
    """Per `model` and `layer` a matrix of `value`, `from` a class `to` a class."""
    named = frame.with_columns(pl.format("{}, layer {}", "model", "layer").alias("panel"))
    order = frame["from"].unique(maintain_order=True).to_list()
    targets = frame["to"].unique(maintain_order=True).to_list()
    top = frame["value"].max()
    assert isinstance(top, float)
    colours = style.theme.sequential
    return matrices(
        named,
        style,
        x="to",
        y="from",
        panel="panel",
        x_order=targets,
        y_order=order,
        x_title="to (keys)",
        y_title="from (queries)",
        value_title="Mass",
        domain=[top * i / (len(colours) - 1) for i in range(len(colours))],
        colours=colours,
        texts=max(len(order), len(targets)) <= WRITTEN,
        most=2,
    )


def _numbers(request: Request) -> FigureNumbers[Context]:
    selection = select(request.run, request.choice, ["flow"], base_only=True)
    total = len(selection.layers)
    if request.choice.layers is None:
        selection = selection.restrict(layers=sorted({selection.layers[0], selection.layers[-1]}))
    values = combine(selection.frame, request.combine)
    # A class that receives exactly 0 from every query has no keys here: drop its column of zeros.
    most = dict(values.group_by("target").agg(pl.col("value").abs().max()).iter_rows())
    empty = [name for name in most if most[name] == 0] if request.choice.items is None else []
    if len(empty) < len(most):
        values = values.filter(~pl.col("target").is_in(empty))
    within = possible("flow", heads=request.combine)
    frame = means(values, ["model", "layer", "item", "target"], request.units, within)
    named = {"item": "from", "target": "to"}
    orders = {"item": selection.items, "target": _in_order(selection.items, frame["target"])}
    frame = in_order(rounded(frame), layer=selection.layers, model=selection.models, **orders)
    paired = between_models(
        values, selection.models, request.units, layer=selection.layers, **orders
    )
    return FigureNumbers(
        measures=["flow"],
        data=frame.rename(named),
        differences=None if paired is None else paired.rename(named),
        width=420 if len(selection.layers) * len(selection.models) == 1 else 780,
        margin=60,
        context=(selection, total, _in_order(selection.items, empty)),
    )


def _in_order(classes: list[str], some: Any) -> list[str]:
    return [name for name in classes if name in set(some)] + sorted(set(some) - set(classes))


def _text(numbers: FigureNumbers[Context], request: Request) -> FigureText:
    (selection, total, empty), colours = numbers.context, request.theme.sequential
    return FigureText(
        title="Attention from each token class to each token class",
        caption=[
            "Each cell is the flow from the queries of a class (row) to the keys of a class "
            "(column): mean attention over these queries",
            f"{scope_text(request.run, request.combine, selection, total)}; "
            f"{settings_text(selection)}; raw values",
            prompts_text(request, numbers.data),
            f"No column for {join(empty)}: no attention goes there" if empty else "",
            *omissions(selection, " (a class without queries)"),
        ],
        models=selection.model_names,
        overview="Coloured matrices, a panel per model and layer: rows are the classes of the "
        "queries, columns those of the keys.",
        axes=["x: class of the key", "y: class of the query"],
        legend=[f"colour: from {colours[0]} (0) to {colours[-1]} (most)"],
        quantity="flow",
        places={"layer": "layer {}", "model": "{}", "from": "from {}", "to": "to {}"},
        order="to",
        split=["layer", "model"],
    )


FIGURE = Figure(
    name="flow",
    shows="attention from class to class, a matrix",
    needs="an experiment with `flow` among its measures has it",
    numbers=_numbers,
    chart=_chart,
    text=_text,
    options={"combine": COMBINE},
)
