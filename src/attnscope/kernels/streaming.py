"""The streaming kernel in plain torch, on any device: tiles of rows against blocks of keys.

Fused attention returns the log-sum-exp of each row. With it, a tile costs one matrix product, one
exponential and four sums.

The log-sum-exp of a fused operator has other rounding errors. Dividing each row by its own sum
removes them, so tiles hold full rows. Partial rows cannot be divided: their log-sum-exp is
recomputed in float64 where that is cheap.

On a CPU, `numba_kernel.py` replaces this kernel for the calls it supports.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnscope.kernels import numba_kernel
from attnscope.kernels.autocast import without_autocast
from attnscope.kernels.call import AttentionSums, KernelRows, score_bounds
from attnscope.kernels.tile_plan import Tile
from attnscope.kernels.tiles import (
    TilePlan,
    blocks,
    dtype_of,
    needs_float64,
    plan_of,
    tiles_of,
    weighted_sum,
)

LN2 = math.log(2.0)


@dataclass(frozen=True, slots=True, eq=False)
class PerRow:
    """Numbers per row, [B, H, M], filled tile by tile.

    p = exp(score − offset). If the offset is the exact log-sum-exp, p is the attention weight;
    otherwise p / row_sum is.
    """

    offset: Tensor
    """Subtracted from the scores."""
    self_weight: Tensor
    """p at the row's own token, times `row_scale`."""
    entropy: Tensor
    """-sum A log2 A times the weight; for sampled rows only."""
    row_sum: Tensor
    """The sum of p and of the sink; 1 if rows are not normalised."""
    row_scale: Tensor
    """Factor of p: the weight of the row over `row_sum`."""


@without_autocast
def reduce(rows: KernelRows) -> AttentionSums:
    """The sums over these rows, with one tile of scores in memory at a time."""
    score_bound = score_bounds(rows)
    B, H, M, _ = rows.q.shape
    G, K = rows.k.shape[1:3]
    full_rows = rows.lse is None or rows.lse.dtype == torch.float32
    large = needs_float64(rows, score_bound, full_rows=full_rows)
    score_bound = score_bound[..., None].expand(B, G, H // G).reshape(B, H)
    if numba_kernel.supports(rows, large):
        return numba_kernel.reduce(rows, score_bound, large)
    new = rows.q.new_zeros((3, B, H, K), dtype=torch.float32)
    mass, entropy, self_mass = new.new_zeros(3, B, H).unbind()
    sums = AttentionSums(
        received=new[0],
        received_later=new[1],
        mass=mass,
        entropy=entropy,
        self_mass=self_mass,
        lse=rows.lse,
        score_bound=score_bound,
        variance=None if rows.fpc is None else new[2],
        entropy_variance=None if rows.fpc is None else new.new_zeros(B, H),
        flow=None if rows.group is None else new.new_zeros(B, H, rows.groups, K),
    )
    if M == 0:
        return sums
    plan = plan_of(rows, full_rows=full_rows)
    each = _per_row(rows, dtype_of(any(map(any, large))))
    # Two buffers for all tiles: new memory for each tile would double the time.
    buffers = new.new_empty(2, plan.size)
    for tiles, heads, keys in blocks(rows, plan, large):
        for tile, diagonal in tiles:
            if not tile.empty:
                _reduce_tile(rows, plan, sums, each, keys, buffers, tile, diagonal, heads)
    return _finalize(rows, plan, sums, each)


def _per_row(rows: KernelRows, dtype: torch.dtype) -> PerRow:
    shape = (2, *rows.q.shape[:3])
    self_weight, entropy = rows.q.new_zeros(shape, dtype=torch.float32).unbind()
    row_sum, row_scale = rows.q.new_ones(shape, dtype=torch.float32).unbind()
    if rows.weight is not None:
        row_scale.mul_(rows.weight[:, None])
    offset = torch.zeros_like(self_weight, dtype=dtype) if rows.lse is None else rows.lse
    return PerRow(offset, self_weight, entropy, row_sum, row_scale)


def _finalize(rows: KernelRows, plan: TilePlan, sums: AttentionSums, each: PerRow) -> AttentionSums:
    """Complete the sums over rows, and compute the exact log-sum-exp."""
    self_weight = each.self_weight
    B, H, M = self_weight.shape
    K = sums.received.shape[2]
    torch.sum(self_weight, -1, out=sums.self_mass)
    if plan.no_future and plan.diagonal_start is not None:
        sums.received_later[..., plan.diagonal_start : plan.diagonal_start + M] = self_weight
    elif plan.no_future:
        where = plan.self_key.clamp(0, K - 1).long()[:, None].expand(B, H, M)
        sums.received_later.scatter_add_(2, where, self_weight)
    torch.sub(sums.received, sums.received_later, out=sums.received_later).clamp_(min=0)
    torch.sum(sums.received, -1, out=sums.mass)
    if rows.fpc is not None and sums.entropy_variance is not None:
        gap = (each.entropy[..., 0::2] - each.entropy[..., 1::2]) * LN2
        torch.sum(gap.square_().mul_(rows.fpc[:, None]), -1, out=sums.entropy_variance)
    sums.entropy.mul_(LN2)
    if rows.lse is not None and rows.lse.dtype == torch.float64:
        return sums
    off = each.row_sum.log()
    lse = each.offset.double() + off
    return replace(sums, lse=lse, lse_error=None if rows.lse is None else off.abs_().amax(-1))


@without_autocast
def exact_lse(rows: KernelRows) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of full rows in float64 [B, H, M], and the largest error of `rows.lse`.

    Recomputed where scores are large or texts short. The error is [B, H].
    """
    assert rows.lse is not None
    lse = rows.lse.double()
    large = needs_float64(rows, score_bounds(rows), full_rows=False)
    if not any(map(any, large)):
        return lse, torch.zeros(lse.shape[:2], device=lse.device)
    plan = plan_of(rows, full_rows=False)
    buffers = rows.q.new_empty((2, plan.size), dtype=torch.float32)
    for tiles, heads, keys in blocks(rows, plan, large):
        if keys.dtype == torch.float32:
            continue
        for tile, _ in tiles:
            index = tile.sequences, heads, tile.rows
            row_sum = torch.zeros_like(lse[index])
            for _, _, x, p in tiles_of(rows, plan, lse, keys, buffers, tile, heads):
                row_sum += torch.exp2(x, out=p).sum(3)
            if rows.sinks is not None:
                row_sum += torch.exp(rows.sinks[heads, None].double() - lse[index])
            lse[index] += row_sum.log().where(row_sum > 0, 0.0)
    return lse, (lse - rows.lse).abs().amax(-1).float()


def _reduce_tile(
    rows: KernelRows,
    plan: TilePlan,
    sums: AttentionSums,
    each: PerRow,
    keys: Tensor,
    buffers: Tensor,
    tile: Tile,
    diagonal: Tile,
    heads: slice,
) -> None:
    """Add one tile of rows and some heads, over all its visible keys.

    Until `_finalize`, `sums.received_later` holds attention from queries that are *not* after the
    key. These are few, so most tiles are added once.
    """
    index = tile.sequences, heads, tile.rows
    by_row = plan.full_rows or rows.weight is not None or rows.fpc is not None
    row_scale = each.row_scale[index]
    for left, right, x, p in tiles_of(rows, plan, each.offset, keys, buffers, tile, heads):
        torch.exp2(x, out=p)
        columns = tile.sequences, heads, slice(left, right)
        visible_sum = _normalize(rows, each, index, p) if plan.full_rows else None
        x.mul_(p)
        if by_row:
            entropy = x.sum(3)
            if visible_sum is not None:  # p was not normalised yet when its logarithm was taken
                entropy.addcmul_(visible_sum, each.row_sum[index].log2(), value=-1.0)
            entropy.mul_(row_scale)
            if rows.fpc is not None:
                each.entropy[index] -= entropy
            sums.entropy[index[:2]] -= entropy.sum(2)
            sums.received[columns] += weighted_sum(row_scale, p)
        else:
            sums.entropy[index[:2]] -= x.sum((2, 3))
            sums.received[columns] += p.sum(2)
        if diagonal.low < right and left < diagonal.high:
            where, at_own = _diagonal(plan, tile, left, right)
            at_own = p.gather(3, where.expand(*p.shape[:3], 1)).mul_(at_own)[..., 0]
            each.self_weight[index] += at_own.mul_(row_scale) if by_row else at_own
        if not plan.no_future:
            order = torch.arange(left, right, device=p.device, dtype=torch.int32)
            before = plan.self_key[tile.sequences, None, tile.rows, None] <= order
            sums.received_later[columns] += weighted_sum(row_scale, p * before)
        if rows.group is not None and sums.flow is not None:
            member = _member(rows, rows.group, plan, tile) * row_scale[:, :, None]
            sums.flow[tile.sequences, heads, :, left:right] += member @ p
        if rows.fpc is not None and sums.variance is not None:
            p.mul_(row_scale[..., None])
            gap = p[:, :, 0::2] - p[:, :, 1::2]
            gap.square_().mul_(_fpc(rows.fpc, tile)[..., None])
            sums.variance[columns] += gap.sum(2)


def _normalize(
    rows: KernelRows, each: PerRow, index: tuple[slice, slice, slice], p: Tensor
) -> Tensor:
    """Make `row_scale` divide full rows by the sum of their entries and the sink.

    Returns the sum of the entries [B, H, M].
    """
    visible_sum = row_sum = p.sum(3)
    if rows.sinks is not None:
        row_sum = visible_sum + torch.exp(rows.sinks[index[1], None].double() - each.offset[index])
    # A row without visible weight is not divided.
    each.row_sum[index] = row_sum.where(visible_sum > 0, 1.0)
    each.row_scale[index].div_(each.row_sum[index])
    return visible_sum


def _diagonal(plan: TilePlan, tile: Tile, left: int, right: int) -> tuple[Tensor, ...]:
    """Index of each row's own token among these keys [sequences or 1, 1, rows, 1], and 1 if it is
    among them, else 0."""
    key: Any = "own", tile, left
    if plan.shared_mask:
        key, tile = ("own", tile.rows.start, left), replace(tile, sequences=slice(0, 1))
    if key in plan.store.kept:
        return plan.store.kept[key]
    self_key = plan.self_key[tile.sequences, None, tile.rows, None].long() - left
    inside = (self_key >= 0) & (self_key < right - left)
    return plan.store.keep(key, self_key.clamp_(0, right - left - 1), inside.float())


def _member(rows: KernelRows, group: Tensor, plan: TilePlan, tile: Tile) -> Tensor:
    """float32 [sequences, 1, classes, rows]: 1 if a row belongs to a class."""
    key = "member", tile
    if key in plan.store.kept:
        return plan.store.kept[key][0]
    classes = torch.arange(rows.groups, device=group.device)[:, None]
    member = (group[tile.sequences, None, None, tile.rows] == classes).float()
    return plan.store.keep(key, member)[0]


def _fpc(fpc: Tensor, tile: Tile) -> Tensor:
    """[sequences, 1, strata]"""
    return fpc[tile.sequences, None, tile.rows.start // 2 : tile.rows.stop // 2]
