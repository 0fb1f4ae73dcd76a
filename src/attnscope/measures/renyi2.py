"""Rényi entropy of order 2: like Shannon entropy, but dominated by the largest weights."""

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import POSITIVE, Measure


def _mean(layer: Layer) -> Tensor:
    each: Tensor = layer.per_query.read("query_entropy", 2)
    return each.nanmean(-1)


RENYI2 = Measure(
    name="renyi2",
    range=POSITIVE,
    description="Rényi entropy of order 2, -ln sum_j A² in nats, mean over queries",
    level="head",
    needs=frozenset({"sums", "rows"}),
    function=_mean,
)
