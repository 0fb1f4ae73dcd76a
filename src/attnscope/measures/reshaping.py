"""Reshaping: how far an insertion moves attention between the tokens around it, factor aside."""

import numpy as np

from attnscope.measures.layer import Array, Layer, Mask
from attnscope.measures.measure import SHARE, Measure, Numbers
from attnscope.measures.slope import ratio, usable


def reshaping(base: Array, variant: Array, keys: Mask) -> tuple[Array, Array]:
    """Half the summed difference of both averages, each divided by its sum, and the number of
    tokens: 0 where one factor explains all, 1 where no token has something on both sides."""
    used = usable(base, variant, keys)
    x, y = (np.where(used, side, 0.0) for side in (base, variant))
    x, y = (ratio(side, side.sum(-1, keepdims=True)) for side in (x, y))
    return np.abs(x - y).sum(-1) / 2, used.sum(-1).astype(np.float64)


def _read(layer: Layer) -> Numbers:
    value, tokens = reshaping(layer.against.averages, layer.sums.averages, layer.keys[:, None])
    return Numbers(value, tokens=tokens)


RESHAPING = Measure(
    name="reshaping",
    range=SHARE,
    about="the share of the averages' sum that moves between tokens; 0 is one factor for all",
    level="head",
    over=frozenset({"keys"}),
    pair=True,
    function=_read,
)
