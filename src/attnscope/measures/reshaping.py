"""Reshaping: how much attention an insertion moves between the other tokens, after rescaling."""

import numpy as np

from attnscope.measures.layer import Array, Layer, Mask
from attnscope.measures.measure import SHARE, Measure, Numbers
from attnscope.measures.slope import ratio, usable


def reshaping(base: Array, variant: Array, keys: Mask) -> tuple[Array, Array]:
    """Half the L1 distance of both averages, each divided by its sum, and the number of tokens.

    0 if one factor explains the change, 1 if no token has attention on both sides.
    """
    used = usable(base, variant, keys)
    x, y = (np.where(used, side, 0.0) for side in (base, variant))
    x, y = (ratio(side, side.sum(-1, keepdims=True)) for side in (x, y))
    return np.abs(x - y).sum(-1) / 2, used.sum(-1).astype(np.float64)


def _read(layer: Layer) -> Numbers:
    value, tokens = reshaping(layer.baseline.averages, layer.sums.averages, layer.keys[:, None])
    return Numbers(value, tokens=tokens)


RESHAPING = Measure(
    name="reshaping",
    range=SHARE,
    description="share of the average attention that moves between tokens; 0 if all change by one "
    "factor",
    level="head",
    per=frozenset({"keys"}),
    compares_to_base=True,
    function=_read,
)
