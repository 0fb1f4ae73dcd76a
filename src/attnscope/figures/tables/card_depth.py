"""Four numbers of a card over layers: attention sink, massive activations, entropy, distance."""

from attnscope.figures.figure import Figure, numbers_of_means
from attnscope.figures.shapes.lines import Lines

FIGURE = Figure(
    name="card-depth",
    shows="attention sink, massive activations, entropy and distance over layers",
    by=["measure", "model", "layer"],
    shape=Lines(
        panel="measure",
        series="model",
        y={
            "first_token": "First-token mass",
            "log10_residual_ratio": "Largest residual over median (log10)",
            "entropy": "Entropy (nats)",
            "distance": "Distance (tokens)",
        },
    ),
    from_table=numbers_of_means,
    title="Attention over depth",
    what="Each line is one model: the mean over heads and texts of first-token mass, the largest "
    "value of the residual stream over the median one, entropy, and distance from query to key",
    sentences=[
        "A value of 3 in the second panel is a massive activation: 1000 times the median "
        "(arXiv 2402.17762)",
    ],
    differences="The table of the card compares models.",
    quantity="value",
    needs="`attnscope card` draws it",
    height=170,
)
