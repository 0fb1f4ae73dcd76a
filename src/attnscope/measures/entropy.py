"""Entropy: how widely a query spreads its attention."""

from attnscope.measures.layer import Layer, Tensor, mean_over_queries
from attnscope.measures.measure import POSITIVE, Measure, Numbers


def entropy(layer: Layer) -> Tensor:
    """[B, H]: mean over the queries of -sum_j A ln A, in nats."""
    return mean_over_queries(layer.sums.entropy, layer.sums.count)


def _read(layer: Layer) -> Numbers:
    error = layer.sums.entropy_error
    return Numbers(
        entropy(layer),
        error=None if error is None else mean_over_queries(error, layer.sums.count),
    )


ENTROPY = Measure(
    name="entropy",
    range=POSITIVE,
    description="entropy of the attention weights, -sum_j A ln A in nats, mean over queries",
    level="head",
    function=_read,
)
