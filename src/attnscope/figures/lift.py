"""Lift over layers: how much more attention a class gets than uniform attention would give it.

Drawn from `mass` and `uniform`. This module must not know how a mass is measured.
"""

import polars as pl

from attnscope.figures.classes import NEEDS, by_class, chart, class_text
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import COMBINE, Figure, FigureNumbers, Request
from attnscope.figures.select import ValueRows
from attnscope.figures.text_format import number
from attnscope.figures.token_types import WHAT


def _against_one(frame: pl.DataFrame) -> str:
    """How many intervals leave out 1, on which side."""
    tested = frame.filter(pl.col("low").is_not_null())
    if tested.is_empty():
        return "No intervals, so nothing is said about preference."
    above = tested.filter(pl.col("low") > 1).height
    below = tested.filter(pl.col("high") < 1).height
    return (
        f"Of {tested.height} lifts with an interval, {above} lie wholly above 1 and {below} wholly "
        f"below; {tested.height - above - below} do not differ from no preference."
    )


def _text(numbers: FigureNumbers[ValueRows], request: Request) -> FigureText:
    return class_text(
        numbers,
        request,
        what=WHAT["lift"],
        title="Lift of every class of tokens, layer by layer",
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
