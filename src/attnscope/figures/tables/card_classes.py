"""Where the attention of a card's texts goes, by token class, over layers."""

from attnscope.figures.figure import Figure, numbers_of_means
from attnscope.figures.shapes.lines import Lines

FIGURE = Figure(
    name="card-classes",
    shows="attention to the first token and to each token class, over layers",
    by=["model", "layer", "class"],
    shape=Lines(panel="model", series="class", y="Attention mass"),
    from_table=numbers_of_means,
    title="Attention by token class",
    what="Each line is one token class: the attention to its tokens, mean over heads and texts; "
    "the first token is a line of its own",
    sentences=["Other classes are those that at most half of the texts have; without an interval"],
    differences="The table of the card compares models.",
    quantity="mass",
    needs="`attnscope card` draws it",
    height=250,
)
