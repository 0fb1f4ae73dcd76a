"""Draws the value of a measure in each head, layers by heads, for one model and condition.

Drawn from any measure that has heads.
"""

from dataclasses import replace
from typing import Any

import polars as pl

from attnscope.figures.charts.matrix import head_matrices
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Request
from attnscope.figures.head_panels import MEASURE, HeadContext, head_means, heads_caption
from attnscope.figures.text_format import count, join
from attnscope.figures.theme import Style, Theme

TITLES = {
    "mass": "Attention to each token class",
    "first token": "Attention to the first token",
}
"""Titles by measure; other measures use their name."""


def _chart(frame: pl.DataFrame, style: Style, *, value_title: str = "Value") -> Any:
    """A matrix of `layer` by `head` per `panel`, coloured by `value`."""
    known = frame["value"].drop_nulls().to_list() or [0.0]
    low, high = min(known), max(known)
    colours = _colours(frame, style.theme)
    if colours is style.theme.diverging:
        low, high = -max(high, -low), max(high, -low)
    elif 0 <= low < high / 2:
        low = 0.0
    step = (high - low or 1.0) / (len(colours) - 1)
    return head_matrices(
        frame,
        style,
        panel="panel",
        value_title=value_title,
        domain=[low + step * i for i in range(len(colours))],
        colours=colours,
    )


def _colours(frame: pl.DataFrame, theme: Theme) -> tuple[str, ...]:
    """A sequential scale; a diverging one if there are negative and positive values."""
    known = frame["value"].drop_nulls().to_list() or [0.0]
    return theme.diverging if min(known) < 0 < max(known) else theme.sequential


def _numbers(request: Request) -> FigureNumbers[HeadContext]:
    numbers = head_means(request)
    width = {1: 480, 2: 640}.get(len(numbers.context.panels), 800)
    return replace(numbers, settings={"value_title": numbers.context.measure}, width=width)


def _text(numbers: FigureNumbers[HeadContext], request: Request) -> FigureText:
    context, colours = numbers.context, _colours(numbers.data, request.theme)
    return FigureText(
        title=f"{TITLES.get(context.measure, context.measure.capitalize())}, by head",
        caption=heads_caption(numbers, request, see="Each cell is one head", interval=False),
        models=context.selection.model_names,
        overview="Coloured matrices of layers by heads, a panel for each of "
        f"{join(context.panels)}.",
        axes=["x: head, from 0", "y: layer, from 0 at the top"],
        legend=[f"colour: from {colours[0]} (least) to {colours[-1]} (most)"],
        quantity=context.measure,
        places={"panel": "{}", "layer": "layer {}", "head": "head {}"},
        split=["panel"],
        notes=[_share(part) for part in numbers.data.partition_by("panel", maintain_order=True)],
        no_differences="The figure shows values; `effect-heads` shows differences.",
    )


def _share(part: pl.DataFrame) -> str:
    """The number of heads with at least half of the largest value."""
    known = part["value"].drop_nulls()
    most = max(known, default=0.0)
    many = int((known >= most / 2).sum())
    name = part["panel"][0]
    return f"{name}: {many} of {count(len(known), 'head')} have at least half of the largest value."


FIGURE = Figure(
    name="head-map",
    shows="layers × heads: the value of a measure for one model and condition",
    needs="an experiment that has this measure has it",
    numbers=_numbers,
    chart=_chart,
    text=_text,
    options={"measure": MEASURE},
)
