"""First-token mass: what the first real token of the text receives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.measures.layer import Layer, mean_over_queries
from attnscope.measures.measure import Measure

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FIRST_TOKEN", "first_token"]


def first_token(layer: Layer) -> Tensor:
    """[B, H]: mean over the queries of their attention to the first real token."""
    sums = layer.sums
    first = sums.first.clamp(min=0).to(sums.count.device)[:, None, None]
    first = first.expand(-1, sums.received.shape[1], 1)
    return mean_over_queries(sums.received.gather(2, first)[..., 0], sums.count)


FIRST_TOKEN = Measure(
    name="first_token",
    about="mean over the queries of their attention to the first token",
    level="head",
    function=first_token,
)
