"""The value of a measure in each head, layers by heads, for one model and condition."""

from attnscope.figures.figure import Figure
from attnscope.figures.options import MEASURE, NORMALISE, SCALE
from attnscope.figures.reading import label
from attnscope.figures.shapes.matrix import Matrix

FIGURE = Figure(
    name="head-map",
    shows="layers × heads: the value of a measure for one model and condition",
    measures=["mass", "entropy"],
    one_model=True,
    derived={"panel": label("model?", "thing")},
    by=["panel", "layer", "head"],
    shape=Matrix(),
    differences="The figure shows values; `effect-heads` shows differences.",
    title="{title}, head by head",
    what="Each cell is one head: {definition}, mean over prompts",
    quantity="{measure}",
    needs="an experiment that has this measure has it",
    options=MEASURE | NORMALISE | SCALE,
)
