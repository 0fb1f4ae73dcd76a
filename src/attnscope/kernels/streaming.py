"""The streamed kernel in plain torch: blocks of queries against blocks of keys, on any device.

With the log-sum-exp of each row in hand (the fused attention returns it) a tile costs one matrix
product, one exponential and one sum. Scores are kept in units of log2 because `exp2` is the
fastest exponential torch has, and the log-sum-exp is subtracted inside the product (`addmm`).
"""

import math

import torch
from torch import Tensor

from attnscope.kernels.call import Rows, Totals

__all__ = ["reduce"]

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# Stands for minus infinity in masked scores: its exponential is 0, and 0 times it is 0, not nan.
MASKED = -1.0e4
# Rows × keys of one tile. A megabyte of float32 stays in a core's second-level cache.
TILE_ROWS, TILE_KEYS = 1024, 256
# Largest block of scores when a row must be seen whole (no log-sum-exp yet).
WHOLE_ROWS = 1 << 20


def reduce(rows: Rows) -> Totals:
    """All totals of these rows, without ever holding more than one tile of scores."""
    B, H, M, _ = rows.q.shape
    G, K = rows.k.shape[1], rows.k.shape[2]
    R = H // G
    new = rows.q.new_zeros
    sampled = rows.shrink is not None
    sums = Totals(
        received=new((B, H, K), dtype=torch.float32),
        later=new((B, H, K), dtype=torch.float32),
        mass=new((B, H), dtype=torch.float32),
        entropy=new((B, H), dtype=torch.float32),
        own=new((B, H), dtype=torch.float32),
        lse=new((B, H, M), dtype=torch.float32) if rows.lse is None else rows.lse,
        variance=new((B, H, K), dtype=torch.float32) if sampled else None,
        entropy_variance=new((B, H), dtype=torch.float32) if sampled else None,
        flow=new((B, H, rows.groups, K), dtype=torch.float32) if rows.group is not None else None,
    )
    if M == 0:
        return sums
    step = TILE_ROWS // R if rows.lse is not None else WHOLE_ROWS // (R * K)
    step = max(2, step - step % 2)  # the two draws of a stratum stay in one tile
    for b in range(B):
        for first in range(0, M, step):
            chunk = slice(first, min(first + step, M))
            span = _span(rows, b, chunk)
            if span is not None:
                for g in range(G):
                    _block(rows, sums, b, slice(g * R, (g + 1) * R), g, chunk, span)
    torch.sum(sums.received, -1, out=sums.mass)
    return sums


def _span(rows: Rows, b: int, chunk: slice) -> tuple[int, int, bool] | None:
    """First and one past last key that any row of the block sees, and whether all see all."""
    start, stop = rows.start[b, chunk], rows.stop[b, chunk]
    if rows.causal:  # known without asking the device
        return 0, chunk.stop, False
    counts = stop > start
    if not bool(counts.any()):
        return None
    low = int(start[counts].min())
    high = int(stop.max())
    same = bool(counts.all()) and int(start.max()) == low and int(stop.min()) == high
    return low, high, same and rows.real is None


def _block(
    rows: Rows,
    sums: Totals,
    b: int,
    heads: slice,
    g: int,
    chunk: slice,
    span: tuple[int, int, bool],
) -> None:
    low, high, same = span
    q = rows.q[b, heads, chunk].float() * (rows.scale * LOG2E)
    R, T, D = q.shape
    q = q.reshape(R * T, D)
    start, stop, own = (t[b, chunk, None] for t in (rows.start, rows.stop, rows.own))
    first_own, last_own = int(own.min()), int(own.max())
    known = rows.lse is not None
    negative = -LOG2E * sums.lse[b, heads, chunk].reshape(R * T, 1) if known else None
    weight = None if rows.weight is None else rows.weight[b, chunk, None]
    entropy = q.new_zeros(R, T) if rows.shrink is not None else None
    width = TILE_KEYS if known else high - low
    for left in range(low, high, width):
        right = min(left + width, high)
        k = rows.k[b, g, left:right].float()
        x = _scores(rows, q, k, negative).view(R, T, right - left)
        keys = torch.arange(left, right, device=q.device, dtype=torch.int32)
        inside = same or (rows.causal and right <= chunk.start + 1)
        if not inside:
            visible = (keys >= start) & (keys < stop)
            if rows.real is not None:
                visible &= rows.real[b, left:right]
            x.masked_fill_(~visible, MASKED)
        if not known:
            x.sub_(_log_sum(rows, sums, x, b, heads, chunk)[..., None])
            if not inside:  # a row that sees nothing has no log-sum-exp
                x.masked_fill_(~visible, MASKED)
        p = torch.exp2(x)
        if entropy is not None:
            entropy -= LN2 * torch.einsum("rtk,rtk->rt", p, x)
        if weight is not None:
            p.mul_(weight)
        column = p.sum(1)
        sums.received[b, heads, left:right] += column
        sums.entropy[b, heads] -= LN2 * _dot(p, x)
        if first_own >= right:
            sums.later[b, heads, left:right] += column
        elif last_own >= left:
            here = (own - left).clamp(0, right - left - 1).long().expand(R, T, 1)
            at_own = (own >= left) & (own < right)
            sums.own[b, heads] += (p.gather(2, here) * at_own).sum((1, 2))
            sums.later[b, heads, left:right] += (p * (own > keys)).sum(1)
        if rows.group is not None and sums.flow is not None:
            member = rows.group[b, chunk] == torch.arange(rows.groups, device=q.device)[:, None]
            sums.flow[b, heads, :, left:right] += member.float() @ p
        if rows.shrink is not None and sums.variance is not None:
            shrink = rows.shrink[b, chunk.start // 2 : chunk.stop // 2, None]
            gap = p[:, 0::2] - p[:, 1::2]
            sums.variance[b, heads, left:right] += gap.square_().mul_(shrink).sum(1)
    if entropy is not None and rows.shrink is not None and sums.entropy_variance is not None:
        if weight is not None:
            entropy *= weight[:, 0]
        gap = entropy[:, 0::2] - entropy[:, 1::2]
        shrink = rows.shrink[b, chunk.start // 2 : chunk.stop // 2]
        sums.entropy_variance[b, heads] += (gap.square() * shrink).sum(1)


def _scores(rows: Rows, q: Tensor, k: Tensor, negative: Tensor | None) -> Tensor:
    """Scores in log2 units, [R·T, keys], less the log-sum-exp where it is known."""
    if rows.softcap is not None:
        cap = rows.softcap * LOG2E
        x = torch.mm(q, k.T).div_(cap).tanh_().mul_(cap)
        return x if negative is None else x.add_(negative)
    return torch.mm(q, k.T) if negative is None else torch.addmm(negative, q, k.T)


def _log_sum(rows: Rows, sums: Totals, x: Tensor, b: int, heads: slice, chunk: slice) -> Tensor:
    """The rows' log-sum-exp in log2 units [R, T], from whole rows of scores; kept in `sums`."""
    lse = torch.logsumexp(x * LN2, -1)
    if rows.sinks is not None:
        lse = torch.logaddexp(lse, rows.sinks[heads, None].float())
    sums.lse[b, heads, chunk] = lse
    return lse * LOG2E


def _dot(p: Tensor, x: Tensor) -> Tensor:
    """Sum of p · x per head, [R]: a dot product each, so that no third tile is made."""
    return torch.stack([torch.dot(a.flatten(), c.flatten()) for a, c in zip(p, x, strict=True)])
