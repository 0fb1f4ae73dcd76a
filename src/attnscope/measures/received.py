"""Attention received by each key: the sum, and the average over later queries."""

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import POSITIVE, SHARE, Measure, Numbers

NEIGHBOURS = 32


def standard_error(variance: Tensor | None, received: Tensor) -> Tensor:
    """The standard error of a sampled sum [B, H, K]; 0 where nothing was sampled.

    If the sample misses the few queries with large weights, a key seems low and certain. So its
    relative variance is at least the mean of that of its neighbours.
    """
    import torch

    if variance is None:
        return torch.zeros_like(received)
    relative = variance / received.square().clamp(min=1e-30)
    around = torch.nn.functional.avg_pool1d(
        relative, 2 * NEIGHBOURS + 1, stride=1, padding=NEIGHBOURS, count_include_pad=False
    )
    around = around.where(variance > 0, 0.0)  # keys with nothing sampled stay exact
    return torch.maximum(variance, around * received.square()).sqrt()


def _read(layer: Layer) -> Numbers:
    import torch

    return Numbers(torch.stack([layer.sums.average, layer.sums.received], -1))


PROFILE = Measure(
    name="profile",
    range={"average": SHARE, "received": POSITIVE},
    description="attention that each token receives",
    level="token",
    columns={
        "average": "mean of A[i, j] over the later queries for which the token is visible",
        "received": "sum of A[i, j] over the queries",
    },
    function=_read,
)
