"""The largest attention weight of a query and the largest score of a head."""

from attnscope.measures.layer import Layer, Tensor
from attnscope.measures.measure import SHARE, Measure


def _read(layer: Layer) -> Tensor:
    import torch

    _, weight, score = layer.per_query.read("largest")
    known = score[..., 0].nan_to_num(-torch.inf).amax(-1)
    return torch.stack([weight[..., 0].nanmean(-1), known.where(known > -torch.inf, torch.nan)], -1)


LARGEST = Measure(
    name="largest",
    range={"largest_weight": SHARE},
    description="largest attention weight and largest score",
    level="head",
    needs=frozenset({"sums", "rows"}),
    columns={
        "largest_weight": "largest weight of a query, mean over queries",
        "largest_score": "largest score of any query, after scale, soft-cap and biases",
    },
    function=_read,
)
