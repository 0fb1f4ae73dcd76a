"""λ of each head: the factor by which filler scales attention to the original tokens."""

from typing import Any

from attnscope.figures.figure import Figure
from attnscope.figures.reading import LAMBDA, LAMBDA_NEEDS, label
from attnscope.figures.shapes.dots import Dots
from attnscope.figures.shapes.matrix import Matrix

MEANS: dict[str, Any] = {
    "y": "λ (1: unchanged)",
    "rule": 1.0,
    "rule_means": "attention unchanged by filler",
}

FIGURE = Figure(
    name="lambda",
    shows="λ of each head",
    measures=["lambda"],
    base_only=False,
    derived={"panel": label("model", "condition?")},
    by=["panel", "model", "condition", "layer", "head"],
    shape=Dots(
        x="layer",
        series="head",
        x_title="Layer (heads side by side)",
        many=Matrix(**MEANS, marked="differs", mark_means="the interval excludes 1"),
        **MEANS,
    ),
    sentences=[f"{LAMBDA}; each condition against the base"],
    differences="λ already compares two conditions: 1 means no difference (see Notes).",
    title="λ, head by head",
    what="Each value is λ of one head; below 1, filler lowers the attention that the original "
    "tokens receive",
    quantity="λ",
    needs=LAMBDA_NEEDS,
    height=230,
)
