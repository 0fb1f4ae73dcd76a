"""Where the attention of a card's generated tokens goes, over layers."""

from attnscope.figures.figure import Figure, numbers_of_means
from attnscope.figures.shapes.lines import Lines

FIGURE = Figure(
    name="card-generated",
    shows="attention of generated tokens to the prompt and to the completion, over layers",
    by=["model", "layer", "part"],
    shape=Lines(panel="model", series="part", y="Attention mass"),
    from_table=numbers_of_means,
    title="Attention of generated tokens",
    what="Each line is one part of the text: the attention of generated tokens to it, mean over "
    "heads, generated tokens and texts",
    differences="The table of the card compares models.",
    quantity="mass",
    needs="`attnscope card` draws it",
    height=250,
)
