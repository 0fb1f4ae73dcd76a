"""The distribution of MLP activations: a histogram and the Gini coefficient.

`capture/log_histogram.py` sums over all tokens of a text. Values are in units of the base's 99th
percentile of absolute values, so that prompts and conditions share one axis.
"""

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import SHARE, Measure

__all__ = ["EDGES", "GINI", "HISTOGRAM"]

STEP = 0.05
EDGES = tuple(round(STEP * n, 2) for n in range(-20, 21))
"""Edges of the bins, in units of the base's 99th percentile of absolute values."""


def _bins(layer: Layer) -> Tensor:
    return layer.recorded["histogram"][:, None, :-1]


def _gini(layer: Layer) -> Tensor:
    return layer.recorded["histogram"][:, -1:]


HISTOGRAM = Measure(
    name="activation_histogram",
    range=SHARE,
    description="share of activations in a bin; `item` is the lower edge of the bin, in units of "
    "the base's 99th percentile of absolute values",
    level="layer",
    needs=frozenset({"activations"}),
    items=tuple(f"{edge:.2f}" for edge in EDGES[:-1]),
    default="0.00",
    function=_bins,
)

GINI = Measure(
    name="activation_gini",
    range=SHARE,
    description="Gini coefficient of the absolute activations: 0 if all are equal, near 1 if few "
    "are large; accurate to 0.005",
    level="layer",
    needs=frozenset({"activations"}),
    function=_gini,
)
