"""Entropy and first-token mass over layers."""

from attnscope.figures.figure import Figure
from attnscope.figures.options import COMBINE
from attnscope.figures.shapes.lines import Lines

FIGURE = Figure(
    name="depth",
    shows="entropy and first-token mass over layers",
    measures=["entropy", "first_token"],
    by=["measure", "model", "layer"],
    shape=Lines(
        panel="measure",
        series="model",
        y={"entropy": "Entropy (nats)", "first_token": "First-token mass"},
    ),
    title="{y}, by layer",
    what="Each line is one model: {y} of a query's attention, mean over queries",
    quantity="value",
    options=COMBINE,
)
