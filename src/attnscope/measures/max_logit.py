"""Max logit: the largest score of a head, which training watches for instability (QK-clip)."""

import math

from attnscope.errors import ScopeError
from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import Measure


def max_logit(layer: Layer) -> Tensor:
    """[B, H]: the largest score of a query and a key it sees; nan without one."""
    largest, count = layer.sums.max_logit, layer.sums.count
    if largest is None:
        raise ScopeError(
            "the largest scores are not known: call watch(model, max_logit=True). A layer that "
            "gives its weights alone may have none",
            code="no-max-logit",
        )
    return largest.where((largest > -math.inf) & (count > 0)[:, None], math.nan)


MAX_LOGIT = Measure(
    name="max_logit",
    description="largest score of any query and key (a logit of the softmax), after scale, "
    "soft-cap and biases; learned sinks do not count",
    level="head",
    needs=frozenset({"sums", "max_logit"}),
    function=max_logit,
)
