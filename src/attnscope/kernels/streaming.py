"""The streaming kernel in plain torch, for any device and all legal rows: one tile at a time.

A tile is some rows of some heads with all their visible keys. Complete rows are divided by their
own sum: the log-sum-exp of a fused operator has other rounding errors. Partial rows cannot be
divided, so `exact_lse` computes their log-sum-exp in float64 where that is cheap.

On a CPU, `numba_kernel.py` replaces this kernel for the calls it supports.
"""

import torch
from torch import Tensor

from attnscope.kernels import numba_kernel
from attnscope.kernels.autocast import without_autocast
from attnscope.kernels.call import LARGE, LOG2E, SINGLE
from attnscope.kernels.one_row import by_query
from attnscope.kernels.rows import AttentionSums, KernelRows, score_bounds
from attnscope.kernels.scores import CHUNK, score_tiles
from attnscope.kernels.tile_plan import Tile

__all__ = ["by_query", "exact_lse", "reduce"]

# Scores of a tile: a few megabytes of float32 stay in the cache of a CPU.
ELEMENTS = 1 << 20
# The score of a key that a row does not see: its exponential is 0, and 0 times it is 0, not nan.
HIDDEN = -1.0e30
# Texts up to this length get the exact log-sum-exp of partial rows, on a CPU.
REFINED = 8192


def needs_float64(rows: KernelRows, score_bound: Tensor, *, partial: bool) -> list[list[bool]]:
    """Whether products need float64, for each sequence and key/value head.

    They do if scores may be large or are not finite, if partial rows must agree with full rows,
    and on a CPU if there are few rows: then it is cheap, and rounding errors do not average out.
    """
    cheap = (partial and rows.k.shape[2] <= REFINED) or rows.q.shape[2] <= SINGLE
    most = 0.0 if cheap and rows.k.device.type == "cpu" else LARGE
    return [[not size <= most for size in groups] for groups in score_bound.tolist()]


@without_autocast
def reduce(rows: KernelRows) -> AttentionSums:
    """The sums over these rows, with one tile of scores in memory at a time."""
    by_group = score_bounds(rows)
    B, H, M, _ = rows.q.shape
    G, K = rows.k.shape[1:3]
    large = needs_float64(rows, by_group, partial=rows.partial)
    score_bound = by_group[..., None].expand(B, G, H // G).reshape(B, H)
    if numba_kernel.supports(rows, large):
        return numba_kernel.reduce(rows, score_bound, large)
    new = torch.zeros(B, H, K, device=rows.q.device)
    known = rows.lse is not None
    sums = AttentionSums(
        received=new,
        received_later=torch.zeros_like(new),
        mass=new.new_zeros(B, H),
        entropy=new.new_zeros(B, H, dtype=torch.float64),
        self_mass=new.new_zeros(B, H, dtype=torch.float64),
        lse=rows.lse if rows.partial else new.new_zeros(B, H, M, dtype=torch.float64),
        lse_error=new.new_zeros(B, H) if known and not rows.partial else None,
        score_bound=score_bound,
        variance=None if rows.fpc is None else torch.zeros_like(new),
        entropy_variance=None if rows.fpc is None else new.new_zeros(B, H),
        flow=None if rows.group is None else new.new_zeros(B, H, rows.groups, K),
        max_logit=new.new_full((B, H), -torch.inf) if rows.max_logit else None,
    )
    if M:
        for tile, heads, x, p in score_tiles(rows, large, elements=ELEMENTS, hidden=HIDDEN):
            _add_tile(rows, sums, tile, heads, x, p)
    sums.received_later.clamp_(min=0)
    torch.sum(sums.received, -1, out=sums.mass)
    sums.entropy, sums.self_mass = sums.entropy.float(), sums.self_mass.float()
    return sums


@without_autocast
def exact_lse(rows: KernelRows) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of full rows in float64 [B, H, M], and the largest error of `rows.lse`.

    Recomputed where scores are large or texts short. The error is [B, H].
    """
    assert rows.lse is not None
    lse = rows.lse.double()
    large = needs_float64(rows, score_bounds(rows), partial=True)
    if not any(map(any, large)):
        return lse, torch.zeros(lse.shape[:2], device=lse.device)
    for tile, heads, x, p in score_tiles(rows, large, elements=ELEMENTS, hidden=HIDDEN):
        if x.dtype == torch.float32:  # a head that stays as it is
            continue
        index = tile.sequences, heads, tile.rows
        torch.mul(x.sub_(lse[index][..., None]), LOG2E, out=p)
        row_sum = p.exp2_().sum(3, dtype=torch.float64)
        row_sum += _sink(rows, heads, lse[index])
        lse[index] += row_sum.log().where(row_sum > 0, 0.0)
    return lse, (lse - rows.lse).abs().amax(-1).float()


def _add_tile(
    rows: KernelRows, sums: AttentionSums, tile: Tile, heads: slice, x: Tensor, p: Tensor
) -> None:
    """Add the rows of a tile; `x` are its scores. Overwrites `x` and `p`."""
    index = tile.sequences, heads, tile.rows
    if sums.max_logit is not None:
        most = x.amax((2, 3)).float()
        known = sums.max_logit[index[:2]]
        torch.maximum(known, most.where(most > HIDDEN / 2, -torch.inf), out=known)
    columns = tile.sequences, heads, slice(tile.low, tile.high)
    offset = _largest(rows, heads, x) if rows.lse is None else rows.lse[index]
    x = x.sub_(offset[..., None]).float().mul_(LOG2E)
    torch.exp2(x, out=p)
    entropy = x.mul_(p).sum(3).div_(LOG2E)
    row_scale = x.new_ones(offset.shape)
    if rows.weight is not None:
        row_scale *= rows.weight[tile.sequences, None, tile.rows]
    if not rows.partial:  # divide rows by the sum of their entries and the sink
        visible = p.sum(3)
        row_sum = (visible + _sink(rows, heads, offset)).where(visible > 0, 1.0)
        off = row_sum.log()
        assert sums.lse is not None
        sums.lse[index] = offset + off.double()
        if sums.lse_error is not None:
            error = sums.lse_error[index[:2]]
            torch.maximum(error, off.abs().amax(2).float(), out=error)
        entropy -= visible * off
        row_scale /= row_sum
    entropy *= row_scale
    sums.entropy[index[:2]] -= entropy.sum(2, dtype=torch.float64)
    received = weighted_sum(row_scale, p)
    sums.received[columns] += received
    sums.received_later[columns] += received
    _add_self(rows, sums, tile, heads, row_scale, p)
    if sums.flow is not None:
        assert rows.group is not None
        classes = torch.arange(rows.groups, device=p.device)[:, None]
        member = rows.group[tile.sequences, None, None, tile.rows] == classes
        sums.flow[tile.sequences, heads, :, tile.low : tile.high] += (
            member * row_scale[:, :, None]
        ) @ p
    if sums.variance is not None and sums.entropy_variance is not None:
        assert rows.fpc is not None
        fpc = rows.fpc[tile.sequences, None, tile.rows.start // 2 : tile.rows.stop // 2]
        p.mul_(row_scale[..., None])
        gap = p[:, :, 0::2] - p[:, :, 1::2]
        sums.variance[columns] += gap.square_().mul_(fpc[..., None]).sum(2)
        gap = entropy[..., 0::2] - entropy[..., 1::2]
        sums.entropy_variance[index[:2]] += gap.square_().mul_(fpc).sum(2)


def _add_self(
    rows: KernelRows, sums: AttentionSums, tile: Tile, heads: slice, row_scale: Tensor, p: Tensor
) -> None:
    """Add the weights of the rows' own tokens, and take what is not from later rows off
    `received_later`."""
    index, width = (tile.sequences, heads), tile.high - tile.low
    self_key = rows.bounds()[2][tile.sequences, None, tile.rows].long() - tile.low
    at = self_key.clamp(0, width - 1).expand(p.shape[:3])
    inside = (self_key >= 0) & (self_key < width)
    self_weight = p.gather(3, at[..., None])[..., 0] * row_scale * inside
    sums.self_mass[index] += self_weight.sum(2, dtype=torch.float64)
    later = sums.received_later[(*index, slice(tile.low, tile.high))]
    if tile.no_future:
        later.scatter_add_(2, at, self_weight.neg_())
    else:
        before = self_key[..., None] <= torch.arange(width, device=p.device)
        later -= weighted_sum(row_scale, p * before)


def _largest(rows: KernelRows, heads: slice, x: Tensor) -> Tensor:
    """The largest score of each row and the sink; 0 for a row without visible keys."""
    most = x.amax(3)
    if rows.sinks is not None:
        most = torch.maximum(most, rows.sinks[heads, None].to(most.dtype))
    return most.where(most > HIDDEN / 2, 0.0)


def _sink(rows: KernelRows, heads: slice, offset: Tensor) -> Tensor | float:
    """What the learned sink adds to the sum of a row."""
    return 0.0 if rows.sinks is None else torch.exp(rows.sinks[heads, None].double() - offset)


def weighted_sum(row_scale: Tensor, p: Tensor) -> Tensor:
    """[B, H, K]: the sum over the rows of a tile [B, H, rows, K], each times its number."""
    B, H, T, K = p.shape
    if T % CHUNK or T <= 2 * CHUNK:
        return (row_scale[:, :, None] @ p)[:, :, 0]
    chunks = row_scale.reshape(B, H, -1, 1, CHUNK) @ p.view(B, H, -1, CHUNK, K)
    return chunks.sum((2, 3))
