"""Entropy: over how many keys does a query spread its attention?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.measures.measure import Measure
from attnscope.measures.seen import Seen, mean_over_queries

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ENTROPY", "entropy"]


def entropy(seen: Seen) -> Tensor:
    """[B, H]: mean over the queries of -sum_j A ln A, in nats."""
    return mean_over_queries(seen.sums.entropy, seen.sums.count)


ENTROPY = Measure(
    name="entropy",
    about="mean over the queries of -sum_j A ln A, in nats",
    level="head",
    function=entropy,
)
