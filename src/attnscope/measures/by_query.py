"""What every single query looks at: its mass on classes and regions, its weight on a key of its
own, its entropy. Stored by the position of the query, or as means over bins of positions.
"""

from attnscope.measures.chosen_keys import induction_key_of, previous_key_of
from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import POSITIVE, SHARE, Measure


def _mass(layer: Layer) -> Tensor:
    """[B, H, Q, classes]; nan where a prompt has no such keys."""
    shares = layer.shares
    assert shares is not None
    there = ~shares.isnan().flatten(1).any(1)
    mass: Tensor = layer.single.read("rows", shares.nan_to_num(), shares.shape[-1])
    return mass.where(there[:, None, None, None], float("nan"))


def _weight(layer: Layer) -> Tensor:
    """[B, H, Q, 2]"""
    import torch

    keys = previous_key_of(layer), induction_key_of(layer)
    return torch.stack([layer.single.read("weight", key_of) for key_of in keys], -1)


def _entropy(layer: Layer) -> Tensor:
    """[B, H, Q]"""
    entropy: Tensor = layer.single.read("query_entropy")
    return entropy


QUERY_MASS = Measure(
    name="query_mass",
    range=SHARE,
    about="the attention of a query to the keys of a class",
    level="query",
    needs=frozenset({"sums", "rows"}),
    over=frozenset({"keys", "classes"}),
    function=_mass,
)

QUERY_WEIGHT = Measure(
    name="query_weight",
    range=SHARE,
    about="the attention of a query to one key of its own: the token before it, or the one that "
    "followed its like the last time; null where there is none",
    level="query",
    needs=frozenset({"sums", "rows"}),
    items=("previous_token", "induction"),
    default="previous_token",
    function=_weight,
)

QUERY_ENTROPY = Measure(
    name="query_entropy",
    range=POSITIVE,
    about="the entropy of a query's attention in nats",
    level="query",
    needs=frozenset({"sums", "rows"}),
    function=_entropy,
)
