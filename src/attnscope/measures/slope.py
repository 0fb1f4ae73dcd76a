"""λ of a head: the factor by which an insertion changes the averages of the tokens around it, and
the factor that it would be if every query spread its attention evenly.

Plain numpy over the last axis, so heads, layers and prompts may stand in front. `keys` says which
tokens count; where none do, or a number is not defined, the answer is nan.
"""

import math

import numpy as np

from attnscope.measures.layer import Array, Layer, Mask
from attnscope.measures.measure import POSITIVE, Measure, Numbers


def usable(base: Array, variant: Array, keys: Mask) -> Mask:
    """The tokens a comparison rests on: aligned, among the keys, with an average on both sides."""
    return np.isfinite(base) & np.isfinite(variant) & keys


def slope(base: Array, variant: Array, keys: Mask) -> tuple[Array, Array, Array, Array]:
    """λ (slope through the origin), the ratio of means, R², and the number of tokens.

    R² says how far one factor explains the variant, token by token: 1 less the squared error of
    `variant ≈ λ · base` over the variant's variation about its mean. It is below 0 where a
    constant would do better than any factor, and nan where the variant does not vary.
    """
    used = usable(base, variant, keys)
    x, y = np.where(used, base, 0.0), np.where(used, variant, 0.0)
    size = used.sum(-1).astype(np.float64)
    factor = ratio((x * y).sum(-1), (x * x).sum(-1))
    left = (y - factor[..., None] * x) ** 2
    varies = (np.where(used, y - ratio(y.sum(-1), size)[..., None], 0.0) ** 2).sum(-1)
    varies = np.where(varies > 1e-24 * (y * y).sum(-1), varies, 0.0)  # less is rounding
    return factor, ratio(y.sum(-1), x.sum(-1)), 1 - ratio(left.sum(-1), varies), size


def ratio(above: Array, below: Array) -> Array:
    """nan where there is nothing to divide by."""
    there = below != 0
    return np.where(there, above / np.where(there, below, 1.0), np.nan)


def _lambda(layer: Layer) -> Numbers:
    *found, size = slope(layer.against.averages, layer.sums.averages, layer.keys[:, None])
    return Numbers(np.stack(found, axis=2), tokens=size[..., None])


def _uniform(layer: Layer) -> Numbers:
    """The same for every head, and given for each, so that λ can be judged head by head."""
    factor, means, _, size = slope(layer.against.uniform, layer.sums.uniform, layer.keys[:, None])
    heads = (layer.sums.received.shape[0], layer.sums.received.shape[1], 2)
    return Numbers(
        np.broadcast_to(np.stack([factor, means], axis=2), heads), tokens=size[..., None]
    )


LAMBDA = Measure(
    name="lambda",
    range={"lambda": POSITIVE, "lambda_ratio": POSITIVE, "lambda_r2": (-math.inf, 1.0)},
    about="how the averages of a prompt's own tokens change with an insertion",
    level="head",
    columns={
        "lambda": "slope through the origin of the variant's averages on the base's",
        "lambda_ratio": "mean of the variant's averages over the mean of the base's",
        "lambda_r2": "how far that one slope explains the variant's averages",
    },
    over=frozenset({"keys"}),
    pair=True,
    function=_lambda,
)

UNIFORM_SLOPE = Measure(
    name="uniform_slope",
    range=POSITIVE,
    about="what λ would be if every query spread its attention evenly over the keys it sees",
    level="head",
    columns={
        "uniform_slope": "the slope, `lambda`, under uniform attention",
        "uniform_ratio": "the ratio of means, `lambda_ratio`, under uniform attention",
    },
    over=frozenset({"keys"}),
    pair=True,
    function=_uniform,
)
