"""Draws lift over layers: the mass of a class divided by that under uniform attention.

Drawn from `mass` and `uniform`.
"""

import polars as pl

from attnscope.figures.classes import NEEDS, by_class, chart, class_text
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import COMBINE, Figure, FigureNumbers, Request
from attnscope.figures.select import ValueRows
from attnscope.figures.text_format import number


def _against_one(frame: pl.DataFrame) -> str:
    """The number of intervals above 1 and below 1."""
    tested = frame.filter(pl.col("low").is_not_null())
    if tested.is_empty():
        return "There are no intervals, so preference is not tested."
    above = tested.filter(pl.col("low") > 1).height
    below = tested.filter(pl.col("high") < 1).height
    return (
        f"Of {tested.height} lifts with an interval, {above} are above 1, {below} are below 1, and "
        f"{tested.height - above - below} are undetermined (the interval contains 1)."
    )


def _text(numbers: FigureNumbers[ValueRows], request: Request) -> FigureText:
    return class_text(
        numbers,
        request,
        what="Each line is the lift of one token class; above 1, the class gets more attention "
        "than "
        "under uniform attention",
        title="Lift of each token class, by layer",
        overview="A line per class, its 95 % interval as a band, and a dashed line at 1, which is "
        f"no preference; a panel per model: {', '.join(numbers.context.models)}.",
        axes=["x: layer, from 0", f"y: lift, up to {number(numbers.data['value'].max())}"],
        quantity="lift",
        notes=[_against_one(numbers.data)],
    )


FIGURE = Figure(
    name="lift",
    shows="mass over what uniform attention would give",
    needs=NEEDS,
    numbers=lambda request: by_class(request, "lift", y_title="Lift (1: no preference)", rule=1.0),
    chart=chart,
    text=_text,
    height=260,
    options={"combine": COMBINE},
)
