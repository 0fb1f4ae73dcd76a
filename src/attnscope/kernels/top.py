"""The keys a query looks at most, for every row that counts."""

import torch
from torch import Tensor

from attnscope.kernels.call import LARGE, Rows, distance_index, link_bias, reach_of

__all__ = ["top_keys"]

SCORES = 1 << 20


def top_keys(rows: Rows, k: int) -> tuple[Tensor, Tensor]:
    """Indices int64 and weights float32 [B, H, M, k], largest first; -1 and 0 where none is left.

    A few whole rows of scores at a time: the cost goes with the number of rows. Each row is
    divided by its own sum; scores that float32 would round noticeably are made in float64.
    """
    B, H, M, _ = rows.q.shape
    G, K = rows.k.shape[1:3]
    k = min(k, K)
    index = torch.full((B, H, M, k), -1, dtype=torch.int64, device=rows.q.device)
    weight = torch.zeros(B, H, M, k, device=rows.q.device)
    step = max(1, SCORES // (H // G * K))
    large = (reach_of(rows) > LARGE).tolist()
    for b in range(B):
        for g in range(G):
            heads = slice(g * (H // G), (g + 1) * (H // G))
            keys = rows.k[b, g].to(torch.float64 if large[b][g] else torch.float32)
            for first in range(0, M, step):
                chunk = slice(first, min(first + step, M))
                x = _scores(rows, keys, b, heads, chunk)
                best, where = x.topk(k)
                found = best > -torch.inf
                lse = x.logsumexp(-1, keepdim=True)
                if rows.sinks is not None:
                    lse = torch.logaddexp(lse, rows.sinks[heads, None, None].to(x.dtype))
                index[b, heads, chunk] = where.where(found, -1)
                weight[b, heads, chunk] = torch.exp(best - lse).where(found, 0.0).float()
    return index, weight


def _scores(rows: Rows, keys: Tensor, b: int, heads: slice, chunk: slice) -> Tensor:
    """[heads, rows, keys], -inf where a row does not see."""
    x = rows.q[b, heads, chunk].to(keys.dtype) @ keys.T * rows.scale
    if rows.softcap is not None:
        x = rows.softcap * torch.tanh(x / rows.softcap)
    start, stop, own = (bound[b, chunk] for bound in rows.bounds())
    if rows.key_bias is not None:
        x = x + rows.key_bias[b if len(rows.key_bias) > 1 else 0, heads, None]
    if rows.distance_bias is not None:
        table = rows.distance_bias[heads]
        x = x + table[:, distance_index(own, 0, len(keys), table.shape[1])]
    linked = link_bias(rows.links, slice(b, b + 1), heads, chunk, slice(None))
    if linked is not None:
        x = x + linked[0]
    order = torch.arange(len(keys), device=keys.device)
    seen = (order >= start[:, None]) & (order < stop[:, None])
    if rows.real is not None:
        seen = seen & rows.real[b]
    return x.masked_fill(~seen, -torch.inf)
