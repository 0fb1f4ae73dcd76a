"""How what comes out of the MLP's non-linearity is spread: a histogram, and how unequal it is.

The sums cover all tokens of a text (`capture/log_histogram.py`). Values are in units of the
*base's* 99th percentile of sizes, so that prompts and conditions share one axis.
"""

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import SHARE, Measure

__all__ = ["EDGES", "GINI", "HISTOGRAM"]

STEP = 0.05
EDGES = tuple(round(STEP * n, 2) for n in range(-20, 21))
"""Where bins begin and end, as shares of the base's 99th percentile of sizes."""


def _bins(layer: Layer) -> Tensor:
    return layer.made["histogram"][:, None, :-1]


def _gini(layer: Layer) -> Tensor:
    return layer.made["histogram"][:, -1:]


HISTOGRAM = Measure(
    name="activation_histogram",
    range=SHARE,
    about="share of the activations between two places, in units of the base's 99th percentile of "
    "sizes; the item is where the bin begins",
    level="layer",
    needs=frozenset({"activations"}),
    items=tuple(f"{edge:.2f}" for edge in EDGES[:-1]),
    default="0.00",
    function=_bins,
)

GINI = Measure(
    name="activation_gini",
    range=SHARE,
    about="how unequal the sizes of activations are: 0 if all are equal, 1 if one has it all; to "
    "within 0.005",
    level="layer",
    needs=frozenset({"activations"}),
    function=_gini,
)
