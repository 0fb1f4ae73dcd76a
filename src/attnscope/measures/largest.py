"""The largest weight of a query, and the largest score: how sharp a head is, and how near to what
its number format can hold.
"""

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import SHARE, Measure


def _read(layer: Layer) -> Tensor:
    import torch

    _, weight, score = layer.single.read("largest")
    known = score[..., 0].nan_to_num(-torch.inf).amax(-1)
    return torch.stack([weight[..., 0].nanmean(-1), known.where(known > -torch.inf, torch.nan)], -1)


LARGEST = Measure(
    name="largest",
    range={"largest_weight": SHARE},
    about="the largest weights and scores",
    level="head",
    needs=frozenset({"sums", "rows"}),
    columns={
        "largest_weight": "mean over the queries of their largest weight",
        "largest_score": "the largest score that any query has, scaled, soft-capped and biased",
    },
    function=_read,
)
