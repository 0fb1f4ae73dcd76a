"""A value by the depth of a needle and the length of its text."""

from attnscope.figures.figure import Figure
from attnscope.figures.options import MEASURE, Option
from attnscope.figures.reading import SHOWS_VALUES
from attnscope.figures.shapes.matrix import Matrix

FIGURE = Figure(
    name="needle-map",
    shows="a value by the depth of a needle and the length of its text",
    measures=["mass", "entropy"],
    pooled=True,
    derived={"panel": "model"},
    by=["panel", "depth", "length"],
    shape=Matrix(
        x="depth",
        down="length",
        x_title="Depth (0: beginning of the text)",
        down_title="Length in words",
        scale="shared",
        from_zero=True,
        numbers=10_000,
    ),
    sentences=["Empty cells: the run has no prompt of this depth and length"],
    differences=SHOWS_VALUES,
    title="{title} by depth of the needle and length of the text",
    what="Each cell is the {measure} for a needle at this depth in a text of this length, mean "
    "over prompts",
    quantity="{measure}",
    needs="an experiment on prompts of the source `needle` has them",
    options=MEASURE
    | {"combine": Option(help="max (default) or mean over heads", known=("max", "mean"))},
)
