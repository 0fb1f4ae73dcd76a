"""The share of MLP activations near zero, by token class."""

from attnscope.figures.figure import Figure
from attnscope.figures.reading import ACTIVATIONS, MODEL_AND_LAYER
from attnscope.figures.shapes.dots import Dots

EPSILON = (
    "Near zero: |activation| < ε, where ε is 0.25 · 1.4826 times the median absolute deviation of "
    "|activation| in the base, per prompt"
)

FIGURE = Figure(
    name="near-zero",
    shows="share of activations near zero, by token class, conditions side by side",
    measures=["class_near_zero"],
    base_only=False,
    layers=lambda layers: layers[:1],
    derived={"panel": MODEL_AND_LAYER, "series": "condition"},
    by=["panel", "series", "item"],
    shape=Dots(x="item", x_title="Token class", y="Share near zero"),
    heads=ACTIVATIONS,
    sentences=[EPSILON],
    differences="base",
    title="Activations near zero, by token class",
    what="Each point is the share of a token class's activations that are near zero, by condition",
    quantity="share near zero",
    undefined=" (a class without a token)",
)
