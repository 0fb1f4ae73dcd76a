"""Heads in the order of their values."""

from attnscope.figures.figure import Figure
from attnscope.figures.options import MEASURE, NORMALISE
from attnscope.figures.reading import label
from attnscope.figures.shapes.dots import Strip

FIGURE = Figure(
    name="head-strip",
    shows="heads sorted by the value of a measure, coloured by layer",
    measures=["mass", "entropy"],
    one_model=True,
    derived={"panel": label("model?", "thing")},
    by=["panel", "layer", "head"],
    shape=Strip(),
    sentences=["L: layer, H: head"],
    differences="The figure shows values; `effect-heads` shows differences.",
    title="Heads ranked by {measure}",
    what="Each dot is one head: {definition}, mean over prompts",
    quantity="{measure}",
    needs="an experiment that has this measure has it",
    height=220,
    options=MEASURE | NORMALISE,
)
