"""The streamed kernel in plain torch: pieces of a batch against blocks of keys, on any device.

With the log-sum-exp of each row in hand (the fused attention returns it) a tile costs one matrix
product, one exponential and four sums; `tiles.py` makes the tiles.

The log-sum-exp of a fused operator comes from another product, rounded otherwise: what that does to
a row is taken out by dividing the row by its own sum, so a tile holds whole rows. Rows that are
seen in parts cannot be divided: their log-sum-exp is made anew, in float64, as far as that is
cheap.

What `compiled.py` takes, most of what a CPU is asked for, it does in place of this.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnscope.kernels import numba_kernel
from attnscope.kernels.autocast import without_autocast
from attnscope.kernels.call import AttentionSums, KernelRows, reach_of
from attnscope.kernels.tile_plan import Tile
from attnscope.kernels.tiles import (
    TilePlan,
    blocks,
    dtype_of,
    large_products,
    plan_of,
    sum_of_rows,
    tiles_of,
)

LN2 = math.log(2.0)


@dataclass(frozen=True, slots=True, eq=False)
class PerRow:
    """What is known of each row, [B, H, M], filled in piece by piece. Entries are the exponentials
    of what is left of its scores: its weights already, or to be divided by their total."""

    below: Tensor
    """What was taken off its scores."""
    own: Tensor
    """Its entry on its own token, times `times`."""
    entropy: Tensor
    """Minus the sum of A log2 A, times its weight; of sampled rows alone."""
    total: Tensor
    """The sum of its entries and the sink's; 1 where they are not divided by it."""
    times: Tensor
    """What its entries are multiplied by: its weight, over their total."""


@without_autocast
def reduce(rows: KernelRows) -> AttentionSums:
    """All totals of these rows, without ever holding more than one tile of scores."""
    reach = reach_of(rows)
    B, H, M, _ = rows.q.shape
    G, K = rows.k.shape[1:3]
    whole = rows.lse is None or rows.lse.dtype == torch.float32
    large = large_products(rows, reach, whole=whole)
    reach = reach[..., None].expand(B, G, H // G).reshape(B, H)
    if numba_kernel.takes(rows, large):
        return numba_kernel.reduce(rows, reach, large)
    new = rows.q.new_zeros((3, B, H, K), dtype=torch.float32)
    mass, entropy, own = new.new_zeros(3, B, H).unbind()
    sums = AttentionSums(
        received=new[0],
        later=new[1],
        mass=mass,
        entropy=entropy,
        own=own,
        lse=rows.lse,
        reach=reach,
        variance=None if rows.shrink is None else new[2],
        entropy_variance=None if rows.shrink is None else new.new_zeros(B, H),
        flow=None if rows.group is None else new.new_zeros(B, H, rows.groups, K),
    )
    if M == 0:
        return sums
    plan = plan_of(rows, whole=whole)
    each = _per_row(rows, dtype_of(any(map(any, large))))
    # Two tiles for all: fresh memory for each would cost as much as the arithmetic.
    tiles = new.new_empty(2, plan.size)
    for pieces, heads, keys in blocks(rows, plan, large):
        for piece, owners in pieces:
            if not piece.empty:
                _block(rows, plan, sums, each, keys, tiles, piece, owners, heads)
    return _finish(rows, plan, sums, each)


def _per_row(rows: KernelRows, dtype: torch.dtype) -> PerRow:
    shape = (2, *rows.q.shape[:3])
    own, entropy = rows.q.new_zeros(shape, dtype=torch.float32).unbind()
    total, times = rows.q.new_ones(shape, dtype=torch.float32).unbind()
    if rows.weight is not None:
        times.mul_(rows.weight[:, None])
    below = torch.zeros_like(own, dtype=dtype) if rows.lse is None else rows.lse
    return PerRow(below, own, entropy, total, times)


def _finish(rows: KernelRows, plan: TilePlan, sums: AttentionSums, each: PerRow) -> AttentionSums:
    """The sums over rows, and the log-sum-exp as the rows themselves say it."""
    own = each.own
    B, H, M = own.shape
    K = sums.received.shape[2]
    torch.sum(own, -1, out=sums.own)
    if plan.backward and plan.first_own is not None:
        sums.later[..., plan.first_own : plan.first_own + M] = own
    elif plan.backward:
        where = plan.own.clamp(0, K - 1).long()[:, None].expand(B, H, M)
        sums.later.scatter_add_(2, where, own)
    torch.sub(sums.received, sums.later, out=sums.later).clamp_(min=0)
    torch.sum(sums.received, -1, out=sums.mass)
    if rows.shrink is not None and sums.entropy_variance is not None:
        gap = (each.entropy[..., 0::2] - each.entropy[..., 1::2]) * LN2
        torch.sum(gap.square_().mul_(rows.shrink[:, None]), -1, out=sums.entropy_variance)
    sums.entropy.mul_(LN2)
    if rows.lse is not None and rows.lse.dtype == torch.float64:
        return sums
    off = each.total.log()
    lse = each.below.double() + off
    return replace(sums, lse=lse, drift=None if rows.lse is None else off.abs_().amax(-1))


@without_autocast
def refine(rows: KernelRows) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of whole rows in float64 [B, H, M], made anew where scores are large or texts
    short, and how far from it the given one was, at most [B, H]."""
    assert rows.lse is not None
    lse = rows.lse.double()
    large = large_products(rows, reach_of(rows), whole=False)
    if not any(map(any, large)):
        return lse, torch.zeros(lse.shape[:2], device=lse.device)
    plan = plan_of(rows, whole=False)
    tiles = rows.q.new_empty((2, plan.size), dtype=torch.float32)
    for pieces, heads, keys in blocks(rows, plan, large):
        if keys.dtype == torch.float32:
            continue
        for piece, _ in pieces:
            there = piece.sequences, heads, piece.rows
            total = torch.zeros_like(lse[there])
            for _, _, x, p in tiles_of(rows, plan, lse, keys, tiles, piece, heads):
                total += torch.exp2(x, out=p).sum(3)
            if rows.sinks is not None:
                total += torch.exp(rows.sinks[heads, None].double() - lse[there])
            lse[there] += total.log().where(total > 0, 0.0)
    return lse, (lse - rows.lse).abs().amax(-1).float()


def _block(
    rows: KernelRows,
    plan: TilePlan,
    sums: AttentionSums,
    each: PerRow,
    keys: Tensor,
    tiles: Tensor,
    piece: Tile,
    owners: Tile,
    heads: slice,
) -> None:
    """One piece and some heads, against all the keys it sees.

    Until it is turned round, `sums.later` holds what came from queries *not* after the key: there
    are few of those, so most tiles need not be added twice.
    """
    there = piece.sequences, heads, piece.rows
    by_row = plan.whole or rows.weight is not None or rows.shrink is not None
    times = each.times[there]
    for left, right, x, p in tiles_of(rows, plan, each.below, keys, tiles, piece, heads):
        torch.exp2(x, out=p)
        columns = piece.sequences, heads, slice(left, right)
        seen = _divide(rows, each, there, p) if plan.whole else None
        x.mul_(p)
        if by_row:
            entropy = x.sum(3)
            if seen is not None:  # the logarithms, too, were of what is not divided yet
                entropy.addcmul_(seen, each.total[there].log2(), value=-1.0)
            entropy.mul_(times)
            if rows.shrink is not None:
                each.entropy[there] -= entropy
            sums.entropy[there[:2]] -= entropy.sum(2)
            sums.received[columns] += sum_of_rows(times, p)
        else:
            sums.entropy[there[:2]] -= x.sum((2, 3))
            sums.received[columns] += p.sum(2)
        if owners.low < right and left < owners.high:
            where, at_own = _own(plan, piece, left, right)
            at_own = p.gather(3, where.expand(*p.shape[:3], 1)).mul_(at_own)[..., 0]
            each.own[there] += at_own.mul_(times) if by_row else at_own
        if not plan.backward:
            order = torch.arange(left, right, device=p.device, dtype=torch.int32)
            before = plan.own[piece.sequences, None, piece.rows, None] <= order
            sums.later[columns] += sum_of_rows(times, p * before)
        if rows.group is not None and sums.flow is not None:
            member = _member(rows, rows.group, plan, piece) * times[:, :, None]
            sums.flow[piece.sequences, heads, :, left:right] += member @ p
        if rows.shrink is not None and sums.variance is not None:
            p.mul_(times[..., None])
            gap = p[:, :, 0::2] - p[:, :, 1::2]
            gap.square_().mul_(_shrink(rows.shrink, piece)[..., None])
            sums.variance[columns] += gap.sum(2)


def _divide(rows: KernelRows, each: PerRow, there: tuple[slice, slice, slice], p: Tensor) -> Tensor:
    """Let `times` divide whole rows by what their entries and the sink's add up to. Returns the sum
    of the entries [B, H, M]."""
    seen = total = p.sum(3)
    if rows.sinks is not None:
        total = seen + torch.exp(rows.sinks[there[1], None].double() - each.below[there])
    # A row that sees nothing, or next to nothing beside its sink, stays as it is.
    each.total[there] = total.where(seen > 0, 1.0)
    each.times[there].div_(each.total[there])
    return seen


def _own(plan: TilePlan, piece: Tile, left: int, right: int) -> tuple[Tensor, ...]:
    """Where rows find their own tokens among these keys [sequences or 1, 1, rows, 1], and a 1 for
    each that does."""
    key: Any = "own", piece, left
    if plan.alike:
        key, piece = ("own", piece.rows.start, left), replace(piece, sequences=slice(0, 1))
    if key in plan.store.kept:
        return plan.store.kept[key]
    own = plan.own[piece.sequences, None, piece.rows, None].long() - left
    found = (own >= 0) & (own < right - left)
    return plan.store.keep(key, own.clamp_(0, right - left - 1), found.float())


def _member(rows: KernelRows, group: Tensor, plan: TilePlan, piece: Tile) -> Tensor:
    """float32 [sequences, 1, classes, rows]: 1 where a row is of a class."""
    key = "member", piece
    if key in plan.store.kept:
        return plan.store.kept[key][0]
    classes = torch.arange(rows.groups, device=group.device)[:, None]
    member = (group[piece.sequences, None, None, piece.rows] == classes).float()
    return plan.store.keep(key, member)[0]


def _shrink(shrink: Tensor, piece: Tile) -> Tensor:
    """[sequences, 1, strata]"""
    return shrink[piece.sequences, None, piece.rows.start // 2 : piece.rows.stop // 2]
