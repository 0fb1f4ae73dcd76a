"""Spikes: do the tokens that stand out fall more than the rest?

Chosen by both sides together (the geometric mean of their averages). Chosen by one of the two
sides, and then divided by it, noise alone would make spikes fall: what is large by chance is
smaller the second time.
"""

import numpy as np

from attnscope.measures.layer import Array, Layer, Mask
from attnscope.measures.measure import POSITIVE, Measure, Numbers
from attnscope.measures.slope import ratio, usable

SHARES = (0.02, 0.05, 0.1, 0.2, 0.3)
"""How many of the aligned tokens are spikes, rounded up: each is measured, so that a reader can
see whether it matters."""

LITTLE_REST = 1e-3
"""Of the sum over all aligned tokens, on either side: a rest that holds less has no ratio. Rounding
a model to bfloat16 changed such ratios up to 60-fold."""
LITTLE_FALL = 1e-2
"""Of the base's sum: a whole fall that is less has no parts. bfloat16 numbers are 0.4 % apart, so
such a fall is mostly rounding."""


def spikes(
    base: Array, variant: Array, keys: Mask, share: float
) -> tuple[Array, Array, Array, Array, Array]:
    """Ratio of means over the spikes and over the rest; the share of the fall that is at the
    spikes; the number of tokens of each.

    Spikes are the share of the tokens (rounded up) with the largest product of both averages; of
    equal ones, the earlier. The ratio over the rest is nan where the rest holds next to nothing of
    either side, the share of the fall where next to nothing falls.
    """
    used = usable(base, variant, keys)
    order = np.argsort(np.where(used, -(base * variant), np.inf), axis=-1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(order.shape[-1]), order.shape), -1)
    # 0.1 · 30 is a hair more than 3.
    wanted = np.ceil(share * used.sum(-1, keepdims=True) - 1e-9)
    at = used & (rank < wanted)
    rest = used & ~at
    (old, new), (old_rest, new_rest) = (
        [np.where(part, side, 0.0).sum(-1) for side in (base, variant)] for part in (at, rest)
    )
    fall, all_fall = old - new, old - new + old_rest - new_rest
    whole, new_whole = old + old_rest, new + new_rest
    little = (old_rest < LITTLE_REST * whole) | (new_rest < LITTLE_REST * new_whole)
    sizes = [part.sum(-1).astype(np.float64) for part in (at, rest)]
    return (
        ratio(new, old),
        np.where(little, np.nan, ratio(new_rest, old_rest)),
        np.where(all_fall >= LITTLE_FALL * whole, ratio(fall, all_fall), np.nan),
        sizes[0],
        sizes[1],
    )


def _read(layer: Layer) -> Numbers:
    value, tokens = [], []
    for share in SHARES:
        at, rest, fall, of_spikes, of_rest = spikes(
            layer.against.averages, layer.sums.averages, layer.keys[:, None], share
        )
        value += [at, rest, fall]
        tokens += [of_spikes, of_rest, of_spikes]
    return Numbers(np.stack(value, axis=2), tokens=np.stack(tokens, axis=2))


SPIKES = Measure(
    name="spikes",
    range={"spike_ratio": POSITIVE, "rest_ratio": POSITIVE},
    about="whether the tokens with the largest averages (of both sides together) fall more",
    level="head",
    columns={
        "spike_ratio": "mean of the variant's averages over the mean of the base's, at the spikes",
        "rest_ratio": "the same at all other tokens; not defined where these hold less than 0.001 "
        "of either side's sum, because rounding would decide it",
        "spike_fall": "the spikes' part of the whole fall; not defined where the fall is less than "
        "0.01 of the base's sum, because rounding would decide it",
    },
    items=tuple(f"{share:g}" for share in SHARES),
    default="0.1",
    over=frozenset({"keys"}),
    pair=True,
    function=_read,
)
