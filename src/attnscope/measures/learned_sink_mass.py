"""Sink mass: what a learned sink takes before any key gets something."""

from attnscope.measures.layer import Layer, Tensor, mean_over_queries
from attnscope.measures.measure import SHARE, Measure


def learned_sink_mass(layer: Layer) -> Tensor:
    """[B, H]: mean over the queries of what a learned sink took; 0 in models without one."""
    sums = layer.sums
    taken = sums.own.new_zeros(sums.own.shape) if sums.sink is None else sums.sink
    return mean_over_queries(taken, sums.count)


LEARNED_SINK_MASS = Measure(
    name="learned_sink_mass",
    range=SHARE,
    about="mean over the queries of what a learned sink took; 0 in models without one",
    level="head",
    function=learned_sink_mass,
)
