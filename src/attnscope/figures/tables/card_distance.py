"""How far back each head of a card attends, layers by heads."""

from attnscope.figures.figure import Figure, numbers_of_means
from attnscope.figures.shapes.matrix import Matrix

FIGURE = Figure(
    name="card-distance",
    shows="layers × heads: distance from query to key",
    by=["model", "layer", "head"],
    shape=Matrix(panel="model", value="value", y="distance in tokens", scale="shared"),
    from_table=numbers_of_means,
    title="How far heads attend",
    what="Each cell is one head: the distance in tokens from a query to the keys that it attends "
    "to, mean over texts. Attention to the first token counts with its full distance",
    differences="The table of the card compares models.",
    quantity="distance",
    needs="`attnscope card` draws it",
)
