"""Flow from class to class: mean over the queries of class c of their mass on class d."""

import torch
from torch import Tensor

from attnscope.measures.mass import mass

__all__ = ["flow"]


def flow(received_from: Tensor, class_ids: Tensor, n: int, queries: Tensor) -> Tensor:
    """[B, H, n, n], from row to column; nan in the rows of classes without a query.

    `received_from` is [B, H, n, K], `queries` the number of queries per class [B, n].
    """
    rows = [
        mass(received_from[:, :, c], class_ids, n, queries[:, c]) for c in range(queries.shape[1])
    ]
    return torch.stack(rows, 2)
