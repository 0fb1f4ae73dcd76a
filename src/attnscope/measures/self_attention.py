"""Two numbers of the diagonal of attention that detect wrong answers in published work.

The logarithm of a token's attention to itself (LLM-Check, NeurIPS 2024), and the eigenvalues of the
Laplacian of the attention graph (arXiv 2502.17598). Attention is lower triangular, so these are the
diagonal of the Laplacian: what a token receives on average, minus its attention to itself.
"""

import numpy as np

from attnscope.measures.layer import Layer, Tensor, or_nan
from attnscope.measures.measure import Measure

LARGEST = 10
"""How many eigenvalues are kept."""
SMALLEST = 2.0**-126
"""The smallest normal float32 number; smaller weights count as this one."""


def _own_weight(layer: Layer) -> Tensor:
    """[B, H, Q]: the attention of each query to its own token; nan for no query."""
    return layer.per_query.weight(layer.per_query.positions)


def log_self_mass(layer: Layer) -> Tensor:
    """[B, H]: mean over the queries of the logarithm."""
    return _own_weight(layer).double().clamp(min=SMALLEST).log().nanmean(-1)


def laplacian(layer: Layer) -> Tensor:
    """[B, H, 10]: the largest eigenvalues over the tokens of the queries; nan where there are
    fewer."""
    import torch

    diagonal, sums = _own_weight(layer).double(), layer.sums
    where = layer.per_query.positions
    queries = sums.visibility("eligible").double().to(where.device)
    average = sums.received.double().to(where.device) / or_nan(queries)[:, None]
    at = where.clamp(min=0)[:, None].expand(diagonal.shape)
    values = (average.gather(2, at) - diagonal).nan_to_num(nan=-np.inf)
    top = values.topk(min(LARGEST, values.shape[-1])).values
    missing = LARGEST - top.shape[-1]
    top = torch.nn.functional.pad(top, (0, missing), value=-np.inf)
    return top.where(top > -np.inf, np.nan)


LOG_SELF_MASS = Measure(
    name="log_self_mass",
    range=(-np.inf, 0.0),
    description="natural logarithm of the attention of a query to its own token, mean over queries",
    level="head",
    needs=frozenset({"sums", "rows"}),
    function=log_self_mass,
)

LAPLACIAN = Measure(
    name="laplacian",
    range=(-1.0, 1.0),
    description="mean attention that a token receives from the queries that see it, minus its "
    "attention to itself; `item` n is the n-th largest over the tokens of the queries",
    level="head",
    needs=frozenset({"sums", "rows"}),
    items=tuple(str(n) for n in range(1, LARGEST + 1)),
    default="1",
    function=laplacian,
)
