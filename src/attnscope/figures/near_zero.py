"""Draws the share of MLP activations near zero, by token class.

Drawn from `class_near_zero`.
"""

from dataclasses import replace
from typing import Any

import polars as pl

from attnscope.figures.caption import keys_text, line_caption
from attnscope.figures.charts.common import series_legend
from attnscope.figures.charts.dots import side_by_side
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Request
from attnscope.figures.numbers import differences, in_order, means, rounded
from attnscope.figures.select import ValueRows, select
from attnscope.figures.text_format import join
from attnscope.figures.theme import Style
from attnscope.stats.tables import possible

AFTER = "MLP activations after the non-linearity (per layer, no heads); queries: all; raw values"
"""The part of the caption that all figures of activations share."""
PANEL = pl.format("{}, layer {}", "model", "layer").alias("panel")


def in_panels(request: Request, selection: ValueRows) -> tuple[ValueRows, pl.DataFrame]:
    """The chosen layers, by default the first; a panel for each model and layer."""
    layers = selection.layers if request.choice.layers is not None else selection.layers[:1]
    selection = replace(
        selection, layers=list(layers), frame=selection.frame.filter(pl.col("layer").is_in(layers))
    )
    return selection, selection.frame.with_columns(PANEL, pl.col("condition").alias("series"))


def _chart(frame: pl.DataFrame, style: Style) -> Any:
    """`value` with `low` and `high` per `item`, a `series` per condition, a panel per `panel`."""
    titles = dict.fromkeys(frame["panel"].unique(), "Token class")
    return side_by_side(frame, style, x="item", x_titles=titles, y_title="Share near zero")


def _numbers(request: Request) -> FigureNumbers[ValueRows]:
    selection, values = in_panels(request, select(request.run, request.choice, ["class_near_zero"]))
    values = values.filter(pl.col("value").is_not_null())
    names = values["panel"].unique(maintain_order=True).to_list()
    items = [item for item in selection.items if item in set(values["item"])]
    frame = means(values, ["panel", "series", "item"], request.units, possible("class_near_zero"))
    orders = {"panel": names, "item": items}
    base = request.run.experiment.base
    pairs = [(c, base) for c in selection.conditions if c != base and base in selection.conditions]
    changed = None
    if pairs:
        changed = differences(
            selection.frame, "condition", pairs, ["model", "layer", "item"], request.units
        )
        changed = changed.with_columns(PANEL)
    return FigureNumbers(
        measures=["class_near_zero"],
        data=rounded(in_order(frame, **orders, series=selection.conditions)),
        differences=changed,
        width=780,
        context=selection,
    )


def _text(numbers: FigureNumbers[ValueRows], request: Request) -> FigureText:
    selection = numbers.context
    return FigureText(
        title="Activations near zero, by token class",
        caption=line_caption(
            *(request, numbers.data, selection, AFTER),
            "Each point is the share of a token class's activations that are near zero, by "
            "condition",
            "Near zero: |activation| < ε, where ε is 0.25 · 1.4826 times the median absolute "
            f"deviation of |activation| in the base, per prompt; {keys_text(selection.keys)}; "
            f"class set: {selection.classes}",
            drawn=", drawn as bars",
            why=" (a class without a token)",
        ),
        models=selection.model_names,
        overview=f"Points with intervals, a column for each token class, side by side for "
        f"{join(selection.conditions)}.",
        axes=["x: token class", "y: share near zero"],
        legend=series_legend(selection.conditions, request.theme),
        quantity="share near zero",
        places={"panel": "{}", "item": "{}", "series": "{}"},
        order="item",
        split=["panel"],
    )


FIGURE = Figure(
    name="near-zero",
    shows="share of activations near zero, by token class, conditions side by side",
    needs="an experiment with `class_near_zero` among its measures has it",
    numbers=_numbers,
    chart=_chart,
    text=_text,
    claims=("digits-near-zero",),
)
