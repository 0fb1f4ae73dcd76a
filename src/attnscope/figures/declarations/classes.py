"""The mass of every token class over layers."""

from attnscope.figures.figure import Figure
from attnscope.figures.options import COMBINE
from attnscope.figures.shapes.lines import Lines

FIGURE = Figure(
    name="classes",
    shows="mass of each token class over layers",
    measures=["mass"],
    by=["model", "layer", "class"],
    shape=Lines(panel="model", series="class", y="Attention mass"),
    title="{title}, by layer",
    what="Each line is one token class: {definition}",
    quantity="mass",
    height=260,
    options=COMBINE,
)
