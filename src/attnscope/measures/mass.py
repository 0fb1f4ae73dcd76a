"""The mass of a class: the share of a query's attention that goes to keys of that class."""

import numpy as np

from attnscope.measures.layer import Layer, Tensor, or_nan
from attnscope.measures.measure import SHARE, Measure, Numbers


def mass(received: Tensor, shares: Tensor, count: Tensor) -> Tensor:
    """float64 [B, H, C]: mean over the queries of their attention to each class.

    `shares` [B, K, C] is the share of each token in each class. `received` may also be that of
    uniform attention. nan for a sequence without queries.
    """
    return received.double() @ shares.double() / or_nan(count)[:, None, None]


def shares_of(class_ids: Tensor, n: int) -> Tensor:
    """[B, K, n]: one-hot shares of class ids, int [B, K]; -1 is no class."""
    return class_ids[..., None].eq(class_ids.new_tensor(range(n))).double()


def lift(mass: Tensor, uniform: Tensor) -> Tensor:
    """Mass over the mass under uniform attention; nan for a class that no query could see."""
    return (mass / uniform).where(uniform > 0, np.nan)


def _read(layer: Layer) -> Numbers:
    sums, shares = layer.sums, layer.shares
    assert shares is not None
    return Numbers(
        mass(sums.received, shares, sums.count),
        uniform=mass(sums.visibility("uniform").float()[:, None], shares, sums.count),
        tokens=shares.nan_to_num().sum(1, keepdim=True),
        # An upper bound: errors of a class's keys are added as if all had the same sign.
        error=None if sums.error is None else mass(sums.error, shares, sums.count),
    )


MASS = Measure(
    name="mass",
    range=SHARE,
    description="attention to the keys of a class, mean over queries",
    level="head",
    per=frozenset({"keys", "classes"}),
    function=_read,
)
