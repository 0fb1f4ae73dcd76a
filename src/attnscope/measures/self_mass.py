"""Self mass: what queries give to their own token."""

from attnscope.measures.layer import Layer, Tensor, mean_over_queries
from attnscope.measures.measure import SHARE, Measure


def self_mass(layer: Layer) -> Tensor:
    """[B, H]: mean over the queries of their attention to themselves."""
    return mean_over_queries(layer.sums.own, layer.sums.count)


SELF_MASS = Measure(
    name="self_mass",
    range=SHARE,
    about="mean over the queries of their attention to themselves",
    level="head",
    function=self_mass,
)
