"""Self mass: attention of queries to their own token."""

from attnscope.measures.layer import Layer, Tensor, mean_over_queries
from attnscope.measures.measure import SHARE, Measure


def self_mass(layer: Layer) -> Tensor:
    """[B, H]: mean over the queries of their attention to themselves."""
    return mean_over_queries(layer.sums.self_mass, layer.sums.count)


SELF_MASS = Measure(
    name="self_mass",
    range=SHARE,
    description="attention of a query to its own token, mean over queries",
    level="head",
    function=self_mass,
)
