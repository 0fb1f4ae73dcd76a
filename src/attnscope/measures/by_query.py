"""Numbers of each query: mass on classes and regions, weight on one key, entropy.

A run stores them by the position of the query, or as means over bins of positions.
"""

from attnscope.measures.chosen_keys import induction_key_of, previous_key_of
from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import POSITIVE, SHARE, Measure


def query_mass(layer: Layer) -> Tensor:
    """[B, H, Q, classes]; nan for a prompt without such keys."""
    shares = layer.shares
    assert shares is not None
    has_keys = ~shares.isnan().flatten(1).any(1)
    mass = layer.per_query.mass(shares.nan_to_num(), shares.shape[-1])
    return mass.where(has_keys[:, None, None, None], float("nan"))


def _weight(layer: Layer) -> Tensor:
    """[B, H, Q, 2]"""
    import torch

    keys = previous_key_of(layer), induction_key_of(layer)
    return torch.stack([layer.per_query.weight(key_of) for key_of in keys], -1)


QUERY_MASS = Measure(
    name="query_mass",
    range=SHARE,
    description="the attention of a query to the keys of a class",
    level="query",
    needs=frozenset({"sums", "rows"}),
    per=frozenset({"keys", "classes"}),
    function=query_mass,
)

QUERY_WEIGHT = Measure(
    name="query_weight",
    range=SHARE,
    description="the attention of a query to one key: the previous token, or the token after the "
    "latest earlier occurrence of the same token; null if there is none",
    level="query",
    needs=frozenset({"sums", "rows"}),
    items=("previous_token", "induction"),
    default="previous_token",
    function=_weight,
)

QUERY_ENTROPY = Measure(
    name="query_entropy",
    range=POSITIVE,
    description="the entropy of a query's attention, in nats",
    level="query",
    needs=frozenset({"sums", "rows"}),
    function=lambda layer: layer.per_query.entropy(),
)
