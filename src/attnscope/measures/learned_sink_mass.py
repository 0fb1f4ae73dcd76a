"""Learned sink mass: the share of the softmax that a learned sink (gpt-oss) takes."""

from attnscope.measures.layer import Layer, Tensor, mean_over_queries
from attnscope.measures.measure import SHARE, Measure


def learned_sink_mass(layer: Layer) -> Tensor:
    """[B, H]: share of the softmax that a learned sink takes; 0 in models without one."""
    sums = layer.sums
    taken = sums.self_mass.new_zeros(sums.self_mass.shape) if sums.sink is None else sums.sink
    return mean_over_queries(taken, sums.count)


LEARNED_SINK_MASS = Measure(
    name="learned_sink_mass",
    range=SHARE,
    description="share of the softmax that a learned sink takes, mean over queries; 0 in models "
    "without one",
    level="head",
    function=learned_sink_mass,
)
