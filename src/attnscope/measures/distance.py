"""Distance: how many tokens back the attention of queries goes."""

from attnscope.measures.layer import Layer, Tensor, mean_over_queries
from attnscope.measures.measure import POSITIVE, Measure


def distance(layer: Layer) -> Tensor:
    """[B, H]: mean over the queries of sum_j A[i, j] (i - j), from what the keys received.

    Rounding makes rows add up to slightly more or less than 1. The sum of the queries' positions is
    scaled by the same factor; otherwise the error would be whole tokens in long texts.
    """
    sums = layer.sums
    total = sums.count[:, None].expand_as(sums.self_mass)
    positions = sums.visibility("position")[:, None].expand_as(sums.self_mass)
    if sums.sink is not None and sums.sink_position is not None:
        total, positions = total - sums.sink, positions - sums.sink_position
    received = sums.received.double()
    where = received.new_tensor(range(received.shape[-1]))
    got = received.sum(-1)
    normalizer = (got / total.clamp(min=1e-30)).where(total > 0, 1.0)
    return mean_over_queries(positions * normalizer - received @ where, sums.count)


DISTANCE = Measure(
    name="distance",
    range=POSITIVE,
    description="attention-weighted distance from query to key in tokens, mean over queries",
    level="head",
    function=distance,
)
