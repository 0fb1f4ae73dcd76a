"""The tiles of the streaming kernel: how a batch is split, and scores of a tile minus an offset.

The log-sum-exp is subtracted inside the matrix product, as one more dimension of the queries. The
result is converted to units of log2, because `exp2` is the fastest exponential in torch; earlier
conversion would round the keys again. Large scores are computed in float64.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnscope.kernels.call import LARGE, SINGLE, KernelRows, distance_index, total_score_bias
from attnscope.kernels.tile_plan import (
    BoundedCache,
    Tile,
    balanced_step,
    causal_tiles,
    diagonal_tiles,
    make_tiles,
    tile_mask,
)

LOG2E = math.log2(math.e)

# Stands for minus infinity in masked scores: its exponential is 0, and 0 times it is 0, not nan.
MASKED = -1.0e30

# Elements of one tile: two megabytes of float32 stay in the cache; and where long rows are whole,
# so that they are not too few. And its keys, where rows are seen in parts.
TILE, TILE_WHOLE, TILE_KEYS = 1 << 19, 1 << 20, 256

# Rows of a piece: the fewer, the less of a causal piece is in its future. However long the text, a
# tile has LEAST rows of every head, or reading the keys would cost more than the products.
LEAST, FEW, MANY = 16, 32, 128
# Rows that are added up in one go: a longer sum in float32 is off by more than the softmax is.
CHUNK = 16

# Texts up to this length have pieces of at least FEW rows.
SHORT = 512

# Texts up to this length are seen whole once more, in float64, where rows are seen in parts; on a
# CPU, since other kernels take the log-sum-exp in float32 again.
REFINED = 8192


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TilePlan:
    """The tiling that all layers with the same rows share."""

    made_from: tuple[Tensor | None, ...]
    """The bounds of this plan, to check whether a cached plan still applies."""
    start: Tensor
    stop: Tensor
    self_key: Tensor
    full_rows: bool
    """Whether every tile holds full rows."""
    width: int
    """Keys of a tile."""
    groups: int
    """Key/value heads of a tile."""
    size: int
    """Elements of a tile."""
    tiles: list[list[tuple[Tile, Tile]]]
    """(tile, tile of the same rows restricted to the diagonal)."""
    no_future: bool
    """Causal: the only key at or after its own token that a row sees is its own."""
    diagonal_start: int | None
    """Key index of the first row, if rows are contiguous and equal in all sequences."""
    shared_mask: bool
    """Whether all sequences have the same rows, so that one mask serves all."""
    store: BoundedCache


def needs_float64(rows: KernelRows, score_bound: Tensor, *, full_rows: bool) -> list[list[bool]]:
    """Whether products need float64, for each sequence and key/value head.

    They do if scores may be large or are not finite, if partial rows must agree with full rows,
    and on a CPU if there are few rows: then it is cheap, and rounding errors do not average out.
    """
    parts = not full_rows and rows.k.shape[2] <= REFINED
    few = rows.q.shape[2] <= SINGLE
    most = 0.0 if (parts or few) and rows.k.device.type == "cpu" else LARGE
    return [[not size <= most for size in groups] for groups in score_bound.tolist()]


def dtype_of(wide: bool) -> torch.dtype:
    """The dtype of products and of numbers per row."""
    return torch.float64 if wide else torch.float32


def plan_of(rows: KernelRows, *, full_rows: bool) -> TilePlan:
    """The tiling of these rows; cached for all layers that share them."""
    B, H, M, _ = rows.q.shape
    G, K = rows.k.shape[1], rows.k.shape[2]
    R = H // G
    key = "streaming", B, H, G, M, K, rows.diagonal_offset, full_rows
    made_from = rows.start, rows.stop, rows.self_key, rows.real, rows.group
    plan: TilePlan | None = rows.cache.get(key)
    if plan is not None and all(a is b for a, b in zip(plan.made_from, made_from, strict=True)):
        return plan
    budget = TILE_WHOLE if full_rows and K > SHORT else TILE
    width = K if full_rows or K <= SHORT else TILE_KEYS
    step = min(MANY, max(FEW, K // 4, budget // (B * H * K)))
    if full_rows and K > SHORT:
        step = min(step, max(LEAST, budget // (R * K)))
    step = balanced_step(M, step)
    # The two draws of a stratum stay in one tile, and so do rows that are summed together.
    step += -step % (CHUNK if step > 2 * CHUNK else 2)
    if not full_rows:
        width = min(K, max(width, budget // (B * H * step)))
    blocks = max(1, budget // (R * step * width))
    groups, sequences = min(G, blocks), balanced_step(B, blocks // G)
    start, stop, self_key = rows.bounds()
    shared_mask = rows.causal and rows.start is None and rows.diagonal_offset == 0 and M == K
    if shared_mask:  # known without reading the bounds
        tiles = causal_tiles(B, M, sequences, step)
        first, in_order, no_future = 0, True, True
    else:
        tiles = make_tiles(start, stop, sequences, step)
        order = self_key[:1, :1] + torch.arange(M, device=self_key.device, dtype=self_key.dtype)
        first = int(self_key[0, 0])
        in_order = 0 <= first <= K - M and bool((self_key == order).all())
        no_future = bool((stop <= self_key + 1)[stop > start].all())
    if in_order:
        diagonals = diagonal_tiles(first, B, M, sequences, step)
    else:
        diagonals = make_tiles(self_key, self_key + 1, sequences, step)
    plan = TilePlan(
        made_from=made_from,
        start=start,
        stop=stop,
        self_key=self_key,
        full_rows=full_rows,
        width=width,
        groups=groups,
        size=sequences * groups * R * step * width,
        tiles=[list(zip(*same, strict=True)) for same in zip(tiles, diagonals, strict=True)],
        no_future=no_future,
        diagonal_start=first if in_order else None,
        shared_mask=shared_mask,
        store=BoundedCache(),
    )
    rows.cache[key] = plan
    return plan


def weighted_sum(times: Tensor, p: Tensor) -> Tensor:
    """[B, H, K]: the sum of the rows of a tile [B, H, rows, K], weighted by `times`."""
    B, H, T, K = p.shape
    if T % CHUNK or T <= 2 * CHUNK:
        return (times[:, :, None] @ p)[:, :, 0]
    few = times.reshape(B, H, -1, 1, CHUNK) @ p.view(B, H, -1, CHUNK, K)
    return few.sum((2, 3))


def blocks(
    rows: KernelRows, plan: TilePlan, large: list[list[bool]]
) -> Iterator[tuple[list[tuple[Tile, Tile]], slice, Tensor]]:
    """The tiles of some sequences, some heads, and their scaled keys [sequences, groups, K, D].

    Keys are float64 where scores are large.
    """
    G, D, R = rows.k.shape[1], rows.k.shape[3], rows.q.shape[1] // rows.k.shape[1]
    carried = rows.lse is not None and rows.softcap is None
    for tiles in plan.tiles:
        for g in range(0, G, plan.groups):
            index = tiles[0][0].sequences, slice(g, min(g + plan.groups, G))
            some = rows.k[index]
            wide = any(any(groups[index[1]]) for groups in large[index[0]])
            keys = some.new_empty((*some.shape[:3], D + carried), dtype=dtype_of(wide))
            torch.mul(some.to(keys.dtype), rows.scale, out=keys[..., :D])
            if carried:
                keys[..., D] = -1.0
            yield tiles, slice(g * R, index[1].stop * R), keys


def tiles_of(
    rows: KernelRows,
    plan: TilePlan,
    offset: Tensor,
    keys: Tensor,
    buffers: Tensor,
    tile: Tile,
    heads: slice,
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yields (first key, last key, scores minus `offset` in units of log2, a second buffer).

    Both tensors are float32 [sequences, heads, rows, keys]. `offset` [B, H, M] is the log-sum-exp
    if known; otherwise the largest score of each row is written there. Products have the dtype of
    the keys; after the subtraction, float32 is precise enough.
    """
    index = tile.sequences, heads, tile.rows
    queries = rows.q[index]
    B, H, T, D = queries.shape
    R = rows.q.shape[1] // rows.k.shape[1]
    keys = keys.flatten(0, 1)
    q = keys.new_empty((B, H, T, keys.shape[2]))
    q[..., :D] = queries
    negative_offset = None
    if keys.shape[2] > D:
        q[..., D] = offset[index]
    elif rows.lse is not None:
        negative_offset = offset[index].to(q.dtype)[..., None].neg()
    q = q.view(len(keys), R * T, -1)
    width = tile.high - tile.low if plan.full_rows else plan.width
    for left in range(tile.low, tile.high, width):
        right = min(left + width, tile.high)
        size = B * H * T * (right - left)
        x, p = (buffer[:size].view(B, H, T, right - left) for buffer in buffers)
        scores = x if q.dtype == x.dtype else torch.empty_like(x, dtype=q.dtype)
        _scores(rows, q, keys[:, left:right], negative_offset, scores)
        _add_biases(rows, plan, tile, heads, left, right, scores)
        _add_mask(rows, plan, tile, left, right, scores)
        if rows.lse is None:
            most = scores.amax(3)
            if rows.sinks is not None:
                most = torch.maximum(most, rows.sinks[heads, None].to(most.dtype))
            most = most.where(most > MASKED / 2, 0.0)  # a row without visible keys has none
            scores.sub_(most[..., None])
            offset[index] = most
        torch.mul(scores, LOG2E, out=x)
        yield left, right, x, p


def _scores(
    rows: KernelRows, q: Tensor, k: Tensor, negative_offset: Tensor | None, x: Tensor
) -> None:
    """Write the scores, minus the log-sum-exp if known, into `x`."""
    torch.bmm(q, k.transpose(1, 2), out=x.view(len(q), q.shape[1], -1))
    if rows.softcap is not None:
        x.div_(rows.softcap).tanh_().mul_(rows.softcap)
    if negative_offset is not None:
        x.add_(negative_offset)


def _add_biases(
    rows: KernelRows, plan: TilePlan, tile: Tile, heads: slice, left: int, right: int, x: Tensor
) -> None:
    """Add the biases by key and distance and the score biases to `x`."""
    if rows.key_bias is not None:
        some = tile.sequences if len(rows.key_bias) > 1 else slice(None)
        x.add_(rows.key_bias[some, heads, None, left:right])
    if rows.distance_bias is not None:
        table = rows.distance_bias[heads]
        key = "distance", tile, left, table.shape[1]
        if key not in plan.store.kept:
            self_key = plan.self_key[tile.sequences, tile.rows]
            if plan.diagonal_start is not None:  # the same in all sequences
                self_key = self_key[:1]
            index = plan.store.keep(key, distance_index(self_key, left, right, table.shape[1]))[0]
        else:
            index = plan.store.kept[key][0]
        x.add_(table[:, index].transpose(0, 1))
    score_bias = total_score_bias(
        rows.score_biases, tile.sequences, heads, tile.rows, slice(left, right)
    )
    if score_bias is not None:
        x.add_(score_bias.clamp(min=MASKED))


def _add_mask(
    rows: KernelRows, plan: TilePlan, tile: Tile, left: int, right: int, x: Tensor
) -> None:
    """Add the mask to the scores of the keys `left … right`, except where all are visible."""
    spans = [(left, right)]
    if rows.real is None:
        from_, to = max(left, tile.dense_from), min(right, tile.dense_to)
        if from_ < to:
            spans = [(left, from_), (to, right)]
    for a, b in spans:
        if a < b:
            x[..., a - left : b - left].add_(_mask(rows, plan, tile, a, b))


def _mask(rows: KernelRows, plan: TilePlan, tile: Tile, left: int, right: int) -> Tensor:
    """float32 [sequences or 1, 1, rows, keys]: the additive mask, 0 for visible keys."""
    key: Any = "mask", tile, left
    if plan.shared_mask and rows.real is None:
        key, tile = ("mask", tile.rows.start, left), replace(tile, sequences=slice(0, 1))
    if key in plan.store.kept:
        return plan.store.kept[key][0]
    mask = tile_mask(tile, left, right, plan.start, plan.stop, rows.real)
    mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, MASKED)
    return plan.store.keep(key, mask)[0]
