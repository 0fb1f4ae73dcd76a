"""Lift over layers: the mass of a class divided by that under uniform attention."""

from attnscope.figures.figure import Figure
from attnscope.figures.options import COMBINE
from attnscope.figures.shapes.lines import Lines

FIGURE = Figure(
    name="lift",
    shows="mass over what uniform attention would give",
    measures=["mass"],
    normalise="lift",
    by=["model", "layer", "class"],
    shape=Lines(panel="model", series="class", y="Lift (1: no preference)"),
    title="{title}, by layer",
    what="Each line is the lift of one token class; above 1, the class gets more attention than "
    "under uniform attention",
    quantity="lift",
    height=260,
    options=COMBINE,
)
