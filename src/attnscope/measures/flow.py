"""Flow from class to class: mean over the queries of class c of their mass on class d."""

from attnscope.measures.layer import Layer, Tensor, or_nan
from attnscope.measures.measure import SHARE, Measure


def flow(received_from: Tensor, shares: Tensor, queries: Tensor, groups: Tensor) -> Tensor:
    """float64 [B, H, C, D], from class c to class d; nan for classes without a query.

    `received_from` is [B, H, groups, K], `queries` the number of queries per group [B, groups],
    `groups` [groups, C] maps groups to classes c, `shares` [B, K, D] keys to classes d. Groups may
    be finer than classes, so that one pass serves several sets of classes.
    """
    import torch

    shares = shares.double()
    # A group at a time: all of them in float64 would be the largest tensor of the pass.
    parts = [received_from[:, :, g].double() @ shares for g in range(len(groups))]
    sums = torch.einsum("bhgd,gc->bhcd", torch.stack(parts, 2), groups.double())
    return sums / or_nan(queries.double() @ groups.double())[:, None, :, None]


def _read(layer: Layer) -> Tensor:
    sums = layer.sums
    assert sums.flow is not None
    assert layer.shares is not None
    assert layer.groups is not None
    by_class = flow(sums.flow, layer.shares, sums.visibility("groups"), layer.groups)
    return by_class.flatten(2)


FLOW = Measure(
    name="flow",
    range=SHARE,
    description="attention of the queries of class c to the keys of class d, mean over queries",
    level="head",
    needs=frozenset({"sums", "flow"}),
    per=frozenset({"class pairs"}),
    function=_read,
)
