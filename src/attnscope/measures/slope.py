"""λ of a head: the factor by which an insertion changes the average attention of other tokens.

`uniform_slope` is the same factor under uniform attention. The functions use the last axis;
earlier axes may be heads, layers and prompts. `keys` selects the tokens; nan if there are none.
"""

import math

import numpy as np

from attnscope.measures.layer import Array, Layer, Mask
from attnscope.measures.measure import POSITIVE, Measure, Numbers


def usable(base: Array, variant: Array, keys: Mask) -> Mask:
    """The tokens to compare: aligned, among the keys, with an average on both sides."""
    return np.isfinite(base) & np.isfinite(variant) & keys


def slope(base: Array, variant: Array, keys: Mask) -> tuple[Array, Array, Array, Array]:
    """λ (slope through the origin), the ratio of means, R², and the number of tokens.

    R² is 1 minus the squared error of `variant ≈ λ · base` over the sum of squares of the variant
    around its mean. It is below 0 if a constant fits better, and nan if the variant is constant.
    """
    used = usable(base, variant, keys)
    x, y = np.where(used, base, 0.0), np.where(used, variant, 0.0)
    size = used.sum(-1).astype(np.float64)
    factor = ratio((x * y).sum(-1), (x * x).sum(-1))
    left = (y - factor[..., None] * x) ** 2
    varies = (np.where(used, y - ratio(y.sum(-1), size)[..., None], 0.0) ** 2).sum(-1)
    varies = np.where(varies > 1e-24 * (y * y).sum(-1), varies, 0.0)  # smaller values are rounding
    return factor, ratio(y.sum(-1), x.sum(-1)), 1 - ratio(left.sum(-1), varies), size


def ratio(above: Array, below: Array) -> Array:
    """The quotient; nan where the denominator is 0."""
    defined = below != 0
    return np.where(defined, above / np.where(defined, below, 1.0), np.nan)


def _lambda(layer: Layer) -> Numbers:
    *values, size = slope(layer.baseline.averages, layer.sums.averages, layer.keys[:, None])
    return Numbers(np.stack(values, axis=2), tokens=size[..., None])


def _uniform(layer: Layer) -> Numbers:
    """Equal for all heads, but repeated for each, so that λ can be compared head by head."""
    factor, means, _, size = slope(layer.baseline.uniform, layer.sums.uniform, layer.keys[:, None])
    heads = (layer.sums.received.shape[0], layer.sums.received.shape[1], 2)
    return Numbers(
        np.broadcast_to(np.stack([factor, means], axis=2), heads), tokens=size[..., None]
    )


LAMBDA = Measure(
    name="lambda",
    range={"lambda": POSITIVE, "lambda_ratio": POSITIVE, "lambda_r2": (-math.inf, 1.0)},
    description="factor by which an insertion changes the average attention of the other tokens",
    level="head",
    columns={
        "lambda": "λ: slope through the origin of the variant's averages on those of the base",
        "lambda_ratio": "mean of the variant's averages over the mean of the base's averages",
        "lambda_r2": "R² of the slope: the share of variation that one factor explains",
    },
    per=frozenset({"keys"}),
    compares_to_base=True,
    function=_lambda,
)

UNIFORM_SLOPE = Measure(
    name="uniform_slope",
    range=POSITIVE,
    description="λ under uniform attention, where a query gives all visible keys the same weight",
    level="head",
    columns={
        "uniform_slope": "`lambda` under uniform attention",
        "uniform_ratio": "`lambda_ratio` under uniform attention",
    },
    per=frozenset({"keys"}),
    compares_to_base=True,
    function=_uniform,
)
