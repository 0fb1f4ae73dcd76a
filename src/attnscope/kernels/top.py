"""The keys a query looks at most, for every row that counts."""

import torch
from torch import Tensor

from attnscope.kernels.call import Rows

__all__ = ["top_keys"]

SCORES = 1 << 20


def top_keys(rows: Rows, lse: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Indices int64 and weights float32 [B, H, M, k], largest first; -1 and 0 where none is left.

    A few whole rows of scores at a time: the cost goes with the number of rows.
    """
    B, H, M, _ = rows.q.shape
    K, per_group = rows.k.shape[2], H // rows.k.shape[1]
    k = min(k, K)
    index = torch.full((B, H, M, k), -1, dtype=torch.int64, device=rows.q.device)
    weight = torch.zeros(B, H, M, k, device=rows.q.device)
    keys = torch.arange(K, device=rows.q.device)
    step = max(1, SCORES // (H * K))
    for b in range(B):
        expanded = rows.k[b].float().repeat_interleave(per_group, 0).transpose(1, 2)
        for first in range(0, M, step):
            chunk = slice(first, min(first + step, M))
            x = rows.q[b, :, chunk].float() @ expanded * rows.scale
            if rows.softcap is not None:
                x = rows.softcap * torch.tanh(x / rows.softcap)
            seen = (keys >= rows.start[b, chunk, None]) & (keys < rows.stop[b, chunk, None])
            if rows.real is not None:
                seen = seen & rows.real[b]
            x = x.masked_fill(~seen, -torch.inf)
            best, where = x.topk(k)
            found = best > -torch.inf
            index[b, :, chunk] = where.where(found, -1)
            weight[b, :, chunk] = torch.exp(best - lse[b, :, chunk, None]).where(found, 0.0)
    return index, weight
