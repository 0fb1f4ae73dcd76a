"""Effective tokens: entropy as a number of keys."""

from attnscope.measures.entropy import entropy
from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import POSITIVE, Measure


def effective_tokens(layer: Layer) -> Tensor:
    """[B, H]: over how many keys queries would spread their attention, if evenly."""
    return entropy(layer).exp()


EFFECTIVE_TOKENS = Measure(
    name="effective_tokens",
    range=POSITIVE,
    about="the exponential of entropy: over how many keys attention is spread",
    level="head",
    function=effective_tokens,
)
