"""Spikes: do the tokens with the largest average attention fall more than the rest?

Spikes are the tokens with the largest geometric mean of base and variant. Spikes chosen by the
base alone would fall by noise alone (regression to the mean).
"""

import numpy as np

from attnscope.measures.layer import Array, Layer, Mask
from attnscope.measures.measure import POSITIVE, Measure, Numbers
from attnscope.measures.slope import ratio, usable

SHARES = (0.02, 0.05, 0.1, 0.2, 0.3)
"""Shares of the aligned tokens that count as spikes, rounded up; each is measured."""

MIN_REST = 1e-3
"""Smallest share of the sum that the rest must have, on both sides, for a ratio. Below it, rounding
a model to bfloat16 changed ratios up to 60-fold."""
MIN_FALL = 1e-2
"""Smallest total fall, as a share of the base's sum, for `spike_fall`. bfloat16 numbers are 0.4 %
apart, so a smaller fall is mostly rounding."""


def spikes(
    base: Array, variant: Array, keys: Mask, share: float
) -> tuple[Array, Array, Array, Array, Array]:
    """Ratio of means at the spikes and at the rest, share of the fall at the spikes, token counts.

    Spikes are the share of the tokens (rounded up) with the largest product of both averages; of
    equal ones, the earlier. The ratio of the rest is nan below `MIN_REST`, the share of the fall
    below `MIN_FALL`.
    """
    used = usable(base, variant, keys)
    order = np.argsort(np.where(used, -(base * variant), np.inf), axis=-1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(order.shape[-1]), order.shape), -1)
    # 0.1 · 30 is slightly more than 3 in floating point.
    n_spikes = np.ceil(share * used.sum(-1, keepdims=True) - 1e-9)
    at = used & (rank < n_spikes)
    rest = used & ~at
    (old, new), (old_rest, new_rest) = (
        [np.where(part, side, 0.0).sum(-1) for side in (base, variant)] for part in (at, rest)
    )
    fall, all_fall = old - new, old - new + old_rest - new_rest
    total, new_total = old + old_rest, new + new_rest
    little = (old_rest < MIN_REST * total) | (new_rest < MIN_REST * new_total)
    sizes = [part.sum(-1).astype(np.float64) for part in (at, rest)]
    return (
        ratio(new, old),
        np.where(little, np.nan, ratio(new_rest, old_rest)),
        np.where(all_fall >= MIN_FALL * total, ratio(fall, all_fall), np.nan),
        sizes[0],
        sizes[1],
    )


def _read(layer: Layer) -> Numbers:
    value, tokens = [], []
    for share in SHARES:
        at, rest, fall, of_spikes, of_rest = spikes(
            layer.baseline.averages, layer.sums.averages, layer.keys[:, None], share
        )
        value += [at, rest, fall]
        tokens += [of_spikes, of_rest, of_spikes]
    return Numbers(np.stack(value, axis=2), tokens=np.stack(tokens, axis=2))


SPIKES = Measure(
    name="spikes",
    range={"spike_ratio": POSITIVE, "rest_ratio": POSITIVE},
    description="whether the tokens with the largest averages fall more than the other tokens",
    level="head",
    columns={
        "spike_ratio": "mean of the variant's averages over the mean of the base's, at the spikes",
        "rest_ratio": "the same at all other tokens; null if these have less than 0.001 of the sum "
        "of base or variant, where rounding dominates",
        "spike_fall": "share of the total fall that is at the spikes; null if the fall is less "
        "than 0.01 of the base's sum, where rounding dominates",
    },
    items=tuple(f"{share:g}" for share in SHARES),
    default="0.1",
    per=frozenset({"keys"}),
    compares_to_base=True,
    function=_read,
)
