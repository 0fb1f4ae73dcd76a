"""The streamed kernel in plain torch: blocks of queries against blocks of keys, on any device.

With the log-sum-exp of each row in hand (the fused attention returns it) a tile costs one matrix
product, one exponential and one sum. Scores are kept in units of log2 because `exp2` is the
fastest exponential torch has, and the log-sum-exp is subtracted inside the product: queries carry
it as one more dimension, in which every key is 1.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attnscope.kernels.call import Rows, Totals

__all__ = ["reduce"]

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# Stands for minus infinity in masked scores: its exponential is 0, and 0 times it is 0, not nan.
MASKED = -1.0e4
# Rows × keys of one tile. Two megabytes of float32 stay in the cache.
TILE_ROWS, TILE_KEYS = 2048, 256
# Rows of the pieces that the diagonal of a causal block is cut into.
CORNER = 128
# Largest block of scores when a row must be seen whole (no log-sum-exp yet).
WHOLE_ROWS = 1 << 20


def reduce(rows: Rows) -> Totals:
    """All totals of these rows, without ever holding more than one tile of scores."""
    rows = rows.filled()
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
    step = min(max(2, step - step % 2), M)  # the two draws of a stratum stay in one tile
    width = min(TILE_KEYS if rows.lse is not None else K, K)
    carried = rows.lse is not None and rows.softcap is None
    # Two tiles for all: fresh memory for each would cost as much as the arithmetic.
    tiles = rows.q.new_empty((2, R * step * width), dtype=torch.float32)
    for b in range(B):
        keys = rows.k[b].float()
        if carried:
            keys = torch.cat([keys, keys.new_ones(G, K, 1)], 2)
        for chunk, span in _work(rows, b, step):
            hidden: dict[int, Tensor] = {}  # masks of tiles, the same for every group
            for g in range(G):
                heads = slice(g * R, (g + 1) * R)
                _block(rows, sums, keys[g], tiles, hidden, b, heads, chunk, span)
    torch.sum(sums.received, -1, out=sums.mass)
    torch.sub(sums.received, sums.later, out=sums.later).clamp_(min=0)
    return sums


Span = tuple[int, int, bool]
"""First and one past last key of a block, and whether all its rows see all of them."""


def _work(rows: Rows, b: int, step: int) -> Iterator[tuple[slice, Span]]:
    """Blocks of rows with the keys to take them against."""
    M = rows.q.shape[2]
    for first in range(0, M, step):
        chunk = slice(first, min(first + step, M))
        if not rows.causal or rows.lse is None:
            span = _span(rows, b, chunk)
            if span is not None:
                yield chunk, span
            continue
        if first:  # what lies wholly in the past of the block
            yield chunk, (0, first, True)
        for corner in range(first, chunk.stop, CORNER):  # and its triangle, cut small
            end = min(corner + CORNER, chunk.stop)
            yield slice(corner, end), (first, end, False)


def _span(rows: Rows, b: int, chunk: slice) -> Span | None:
    """The keys that any row of the block sees; None where no row sees any."""
    start, stop = (bound[b, chunk] for bound in rows.bounds()[:2])
    counts = stop > start
    if not bool(counts.any()):
        return None
    low, high = int(start[counts].min()), int(stop.max())
    same = bool(counts.all()) and int(start.max()) == low and int(stop.min()) == high
    return low, high, same and rows.real is None


def _block(
    rows: Rows,
    sums: Totals,
    keys: Tensor,
    tiles: Tensor,
    hidden: dict[int, Tensor],
    b: int,
    heads: slice,
    chunk: slice,
    span: Span,
) -> None:
    """One block of queries of one group of heads, against all the keys [K, D] it sees.

    Until `reduce` turns it round, `sums.later` holds what came from queries *not* after the key:
    there are few of those, so most tiles need not be added twice.
    """
    low, high, same = span
    q = rows.q[b, heads, chunk].float() * (rows.scale * LOG2E)
    R, T, D = q.shape
    q = q.reshape(R * T, D)
    start, stop, own = (bound[b, chunk, None] for bound in rows.bounds())
    first_own = chunk.start if rows.causal else int(own.min())
    known = rows.lse is not None
    negative = None
    if rows.lse is not None:
        negative = -LOG2E * rows.lse[b, heads, chunk].reshape(R * T, 1)
        if keys.shape[1] > D:
            q, negative = torch.cat([q, negative], 1), None
    weight = None if rows.weight is None else rows.weight[b, chunk, None]
    received = sums.received[b, heads]
    row_entropy = q.new_zeros(R, T) if rows.shrink is not None else None
    total_entropy = q.new_zeros(R)
    width = tiles.shape[1] // (R * T) if known else high - low
    for left in range(low, high, width):
        right = min(left + width, high)
        size = R * T * (right - left)
        x, p = (tile[:size].view(R, T, right - left) for tile in tiles)
        _scores(rows, q, keys[left:right], negative, x.view(R * T, right - left))
        inside = same or (rows.causal and right <= chunk.start + 1)
        if not inside:
            if left not in hidden:
                columns = torch.arange(left, right, device=q.device, dtype=torch.int32)
                hidden[left] = (columns < start) | (columns >= stop)
                if rows.real is not None:
                    hidden[left] |= ~rows.real[b, left:right]
            x.masked_fill_(hidden[left], MASKED)
        if not known:
            x.sub_(_log_sum(rows, sums, x, b, heads, chunk)[..., None])
            if not inside:  # a row that sees nothing has no log-sum-exp
                x.masked_fill_(hidden[left], MASKED)
        torch.exp2(x, out=p)
        if weight is not None:
            p.mul_(weight)
        received[:, left:right] += p.sum(1)
        x.mul_(p)
        if row_entropy is None:
            total_entropy += x.sum((1, 2))
        else:
            row_entropy += x.sum(2)
        if first_own < right:
            columns = torch.arange(left, right, device=q.device, dtype=torch.int32)
            sums.later[b, heads, left:right] += (p * (own <= columns)).sum(1)
            here = (own - left).clamp(0, right - left - 1).long().expand(R, T, 1)
            at_own = (own >= left) & (own < right)
            sums.own[b, heads] += (p.gather(2, here) * at_own).sum((1, 2))
        if rows.group is not None and sums.flow is not None:
            member = rows.group[b, chunk] == torch.arange(rows.groups, device=q.device)[:, None]
            sums.flow[b, heads, :, left:right] += member.float() @ p
        if rows.shrink is not None and sums.variance is not None:
            shrink = rows.shrink[b, chunk.start // 2 : chunk.stop // 2, None]
            gap = p[:, 0::2] - p[:, 1::2]
            sums.variance[b, heads, left:right] += gap.square_().mul_(shrink).sum(1)
    if row_entropy is None:
        sums.entropy[b, heads] -= LN2 * total_entropy
        return
    assert rows.shrink is not None
    assert sums.entropy_variance is not None
    row_entropy *= -LN2
    sums.entropy[b, heads] += row_entropy.sum(1)
    gap = row_entropy[:, 0::2] - row_entropy[:, 1::2]
    shrink = rows.shrink[b, chunk.start // 2 : chunk.stop // 2]
    sums.entropy_variance[b, heads] += (gap.square() * shrink).sum(1)


def _scores(rows: Rows, q: Tensor, k: Tensor, negative: Tensor | None, out: Tensor) -> None:
    """Scores in log2 units, [R·T, keys], less the log-sum-exp where it is known."""
    torch.mm(q, k.T, out=out)
    if rows.softcap is not None:
        cap = rows.softcap * LOG2E
        out.div_(cap).tanh_().mul_(cap)
    if negative is not None:
        out.add_(negative)


def _log_sum(rows: Rows, sums: Totals, x: Tensor, b: int, heads: slice, chunk: slice) -> Tensor:
    """The rows' log-sum-exp in log2 units [R, T], from whole rows of scores; kept in `sums`."""
    lse = torch.logsumexp(x * LN2, -1)
    if rows.sinks is not None:
        lse = torch.logaddexp(lse, rows.sinks[heads, None].float())
    assert sums.lse is not None
    sums.lse[b, heads, chunk] = lse
    return lse * LOG2E
