"""Effective tokens: entropy as a number of keys."""

from attnscope.measures.entropy import entropy
from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import POSITIVE, Measure


def effective_tokens(layer: Layer) -> Tensor:
    """[B, H]: the number of keys over which uniform attention has the same entropy."""
    return entropy(layer).exp()


EFFECTIVE_TOKENS = Measure(
    name="effective_tokens",
    range=POSITIVE,
    description="exp(entropy): the number of keys over which attention is spread",
    level="head",
    function=effective_tokens,
)
