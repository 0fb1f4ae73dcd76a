"""Rényi's entropy of order 2: like Shannon's, and led by the largest weights."""

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import POSITIVE, Measure


def _mean(layer: Layer) -> Tensor:
    each: Tensor = layer.single.read("query_entropy", 2)
    return each.nanmean(-1)


RENYI2 = Measure(
    name="renyi2",
    range=POSITIVE,
    about="mean over the queries of -ln sum_j A², in nats",
    level="head",
    needs=frozenset({"sums", "rows"}),
    function=_mean,
)
