"""Distance: how far back queries look."""

from attnscope.measures.layer import Layer, Tensor, mean_over_queries
from attnscope.measures.measure import POSITIVE, Measure


def distance(layer: Layer) -> Tensor:
    """[B, H]: mean over the queries of sum_j A[i, j] (i - j), from what the keys received.

    The rows of a head really add up to a hair less or more than they should; the sum of the
    queries' positions is scaled by that hair, or long texts would turn it into whole tokens.
    """
    sums = layer.sums
    total = sums.count[:, None].expand_as(sums.own)
    positions = sums.exposed("position")[:, None].expand_as(sums.own)
    if sums.sink is not None and sums.sink_position is not None:
        total, positions = total - sums.sink, positions - sums.sink_position
    received = sums.received.double()
    where = received.new_tensor(range(received.shape[-1]))
    got = received.sum(-1)
    hair = (got / total.clamp(min=1e-30)).where(total > 0, 1.0)
    return mean_over_queries(positions * hair - received @ where, sums.count)


DISTANCE = Measure(
    name="distance",
    range=POSITIVE,
    about="mean over the queries of how far back they look, in tokens",
    level="head",
    function=distance,
)
