"""A variant against its base: λ of a head, and how even the inserted tokens are.

Plain numpy over the last axis, so heads, layers and prompts may stand in front. `twins` says which
tokens count; where none do, or a number is not defined, the answer is nan.

This module must not know prompts, models or where averages come from.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["SPIKES", "on_variant", "slope", "spike_and_rest", "uniformity"]

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

SPIKES = 10
"""Spikes are one in so many of the aligned tokens: those with the largest base average."""


def on_variant(base: Array, twin: NDArray[np.int64]) -> Array:
    """The base's averages [B, H, K of base], at the places of their twins [B, H, K of variant].

    `twin` [B, K of variant] is the base token of each, -1 for none; there the answer is nan.
    """
    where = np.broadcast_to(np.maximum(twin, 0)[:, None], (*base.shape[:2], twin.shape[1]))
    return np.where((twin < 0)[:, None], np.nan, np.take_along_axis(base, where, axis=2))


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
    factor = _ratio((x * y).sum(-1), (x * x).sum(-1))
    left = (y - factor[..., None] * x) ** 2
    varies = (np.where(used, y - _ratio(y.sum(-1), size)[..., None], 0.0) ** 2).sum(-1)
    varies = np.where(varies > 1e-24 * (y * y).sum(-1), varies, 0.0)  # less is rounding
    return factor, _ratio(y.sum(-1), x.sum(-1)), 1 - _ratio(left.sum(-1), varies), size


def spike_and_rest(base: Array, variant: Array, keys: Mask) -> tuple[Array, Array, Array, Array]:
    """Ratio of means over the spikes and over the rest, and the number of tokens of each.

    Spikes are the tenth of the tokens (rounded up) with the largest base average; of equal ones,
    the earlier.
    """
    used = usable(base, variant, keys)
    order = np.argsort(np.where(used, -base, np.inf), axis=-1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(order.shape[-1]), order.shape), -1)
    spikes = used & (rank < -(-used.sum(-1, keepdims=True) // SPIKES))
    rest = used & ~spikes
    ratios = [
        _ratio(np.where(part, variant, 0.0).sum(-1), np.where(part, base, 0.0).sum(-1))
        for part in (spikes, rest)
    ]
    sizes = [part.sum(-1).astype(np.float64) for part in (spikes, rest)]
    return ratios[0], ratios[1], sizes[0], sizes[1]


def uniformity(average: Array, filler: Mask) -> tuple[Array, Array]:
    """Coefficient of variation of the averages over the inserted tokens, and their number."""
    used = np.isfinite(average) & filler
    size = used.sum(-1).astype(np.float64)
    mean = _ratio(np.where(used, average, 0.0).sum(-1), size)
    off = np.where(used, average - mean[..., None], 0.0)
    return _ratio(np.sqrt(_ratio((off * off).sum(-1), size)), mean), size


def _ratio(above: Array, below: Array) -> Array:
    """nan where there is nothing to divide by."""
    there = below != 0
    return np.where(there, above / np.where(there, below, 1.0), np.nan)
