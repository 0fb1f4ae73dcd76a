"""First-token mass: attention to the first real token of the text."""

from attnscope.measures.layer import Layer, Tensor, mean_over_queries
from attnscope.measures.measure import SHARE, Measure, Numbers


def first_token(layer: Layer) -> Tensor:
    """[B, H]: mean over the queries of their attention to the first real token."""
    return _of_first(layer, layer.sums.received)


def _of_first(layer: Layer, of_keys: Tensor) -> Tensor:
    first = layer.sums.first_token.clamp(min=0).to(of_keys.device)[:, None, None]
    first = first.expand(-1, of_keys.shape[1], 1)
    return mean_over_queries(of_keys.gather(2, first)[..., 0], layer.sums.count)


def _read(layer: Layer) -> Numbers:
    error = layer.sums.error
    return Numbers(first_token(layer), error=None if error is None else _of_first(layer, error))


FIRST_TOKEN = Measure(
    name="first_token",
    range=SHARE,
    description="attention to the first token, mean over queries",
    level="head",
    function=_read,
)
