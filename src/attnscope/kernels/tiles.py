"""The tiles of the streamed kernel: how a batch is cut into pieces, and the scores of one piece
against one block of keys, less what is taken off each row.

The log-sum-exp is subtracted inside the product: queries carry it as one more dimension. What is
left is turned into units of log2, because `exp2` is the fastest exponential torch has; not before,
or keys would be rounded once more. Where scores are so large that float32 would round them
noticeably, products are made in float64. Must not know what is summed over the tiles.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnscope.kernels.call import LARGE, SINGLE, KernelRows, distance_index, link_bias
from attnscope.kernels.tile_plan import BoundedCache, Tile, cut, cut_causal, cut_own, even, see

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
    """What is the same for all layers that share these rows."""

    given: tuple[Tensor | None, ...]
    """The bounds this was made from, to know them again."""
    start: Tensor
    stop: Tensor
    own: Tensor
    whole: bool
    """Whether every tile holds whole rows."""
    width: int
    """Keys of a tile."""
    groups: int
    """Key/value heads of a tile."""
    size: int
    """Elements of a tile."""
    pieces: list[list[tuple[Tile, Tile]]]
    """Each piece with another of the same rows, in which a row sees its own token alone."""
    backward: bool
    """No row sees a key after its own token; so, of its own and later keys, it sees its own."""
    first_own: int | None
    """Where the tokens of the rows begin, if they stand in order and alike in all sequences."""
    alike: bool
    """Whether all sequences have the same rows: then masks are made for one of them."""
    store: BoundedCache


def large_products(rows: KernelRows, reach: Tensor, *, whole: bool) -> list[list[bool]]:
    """Where products are made in float64, for each sequence and group of heads: where scores may be
    large (or are no numbers), where rows seen in parts must agree with whole ones, and where there
    are so few rows that it costs nothing and no sum over them evens their rounding out."""
    parts = not whole and rows.k.shape[2] <= REFINED
    few = rows.q.shape[2] <= SINGLE
    most = 0.0 if (parts or few) and rows.k.device.type == "cpu" else LARGE
    return [[not size <= most for size in groups] for groups in reach.tolist()]


def dtype_of(wide: bool) -> torch.dtype:
    """Of products, and of what is known of rows beside them."""
    return torch.float64 if wide else torch.float32


def plan_of(rows: KernelRows, *, whole: bool) -> TilePlan:
    """How to cut these rows; made once for all layers that share them."""
    B, H, M, _ = rows.q.shape
    G, K = rows.k.shape[1], rows.k.shape[2]
    R = H // G
    key = "streaming", B, H, G, M, K, rows.shift, whole
    given = rows.start, rows.stop, rows.own, rows.real, rows.group
    made: TilePlan | None = rows.cache.get(key)
    if made is not None and all(a is b for a, b in zip(made.given, given, strict=True)):
        return made
    room = TILE_WHOLE if whole and K > SHORT else TILE
    width = K if whole or K <= SHORT else TILE_KEYS
    step = min(MANY, max(FEW, K // 4, room // (B * H * K)))
    if whole and K > SHORT:
        step = min(step, max(LEAST, room // (R * K)))
    step = even(M, step)
    # The two draws of a stratum stay in one piece, and so do rows that are added up together.
    step += -step % (CHUNK if step > 2 * CHUNK else 2)
    if not whole:
        width = min(K, max(width, room // (B * H * step)))
    blocks = max(1, room // (R * step * width))
    groups, sequences = min(G, blocks), even(B, blocks // G)
    start, stop, own = rows.bounds()
    alike = rows.causal and rows.start is None and rows.shift == 0 and M == K
    if alike:  # known without a look at them
        pieces = cut_causal(B, M, sequences, step)
        first, in_order, backward = 0, True, True
    else:
        pieces = cut(start, stop, sequences, step)
        order = own[:1, :1] + torch.arange(M, device=own.device, dtype=own.dtype)
        first = int(own[0, 0])
        in_order = 0 <= first <= K - M and bool((own == order).all())
        backward = bool((stop <= own + 1)[stop > start].all())
    if in_order:
        owners = cut_own(first, B, M, sequences, step)
    else:
        owners = cut(own, own + 1, sequences, step)
    made = TilePlan(
        given=given,
        start=start,
        stop=stop,
        own=own,
        whole=whole,
        width=width,
        groups=groups,
        size=sequences * groups * R * step * width,
        pieces=[list(zip(*same, strict=True)) for same in zip(pieces, owners, strict=True)],
        backward=backward,
        first_own=first if in_order else None,
        alike=alike,
        store=BoundedCache(),
    )
    rows.cache[key] = made
    return made


def sum_of_rows(times: Tensor, p: Tensor) -> Tensor:
    """[B, H, K]: the rows of a tile [B, H, rows, K], each times its number [B, H, rows]."""
    B, H, T, K = p.shape
    if T % CHUNK or T <= 2 * CHUNK:
        return (times[:, :, None] @ p)[:, :, 0]
    few = times.reshape(B, H, -1, 1, CHUNK) @ p.view(B, H, -1, CHUNK, K)
    return few.sum((2, 3))


def blocks(
    rows: KernelRows, plan: TilePlan, large: list[list[bool]]
) -> Iterator[tuple[list[tuple[Tile, Tile]], slice, Tensor]]:
    """The pieces of some sequences, some heads, and the keys of both [sequences, groups, K, D],
    scaled; in float64 where scores are large."""
    G, D, R = rows.k.shape[1], rows.k.shape[3], rows.q.shape[1] // rows.k.shape[1]
    carried = rows.lse is not None and rows.softcap is None
    for pieces in plan.pieces:
        for g in range(0, G, plan.groups):
            there = pieces[0][0].sequences, slice(g, min(g + plan.groups, G))
            some = rows.k[there]
            wide = any(any(groups[there[1]]) for groups in large[there[0]])
            keys = some.new_empty((*some.shape[:3], D + carried), dtype=dtype_of(wide))
            torch.mul(some.to(keys.dtype), rows.scale, out=keys[..., :D])
            if carried:
                keys[..., D] = -1.0
            yield pieces, slice(g * R, there[1].stop * R), keys


def tiles_of(
    rows: KernelRows,
    plan: TilePlan,
    below: Tensor,
    keys: Tensor,
    tiles: Tensor,
    piece: Tile,
    heads: slice,
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """The scores of a piece, tile by tile: from key, to key, what is left of them after `below` is
    taken off, in units of log2 (float32 [sequences, heads, rows, keys]), and room for as much.

    `below` [B, H, M] is the log-sum-exp where it is known; else the largest score of each row is
    put there. Products are made in the type of the keys: what is left are the digits that count,
    and fits into float32.
    """
    there = piece.sequences, heads, piece.rows
    given = rows.q[there]
    B, H, T, D = given.shape
    R = rows.q.shape[1] // rows.k.shape[1]
    keys = keys.flatten(0, 1)
    q = keys.new_empty((B, H, T, keys.shape[2]))
    q[..., :D] = given
    negative = None
    if keys.shape[2] > D:
        q[..., D] = below[there]
    elif rows.lse is not None:
        negative = below[there].to(q.dtype)[..., None].neg()
    q = q.view(len(keys), R * T, -1)
    width = piece.high - piece.low if plan.whole else plan.width
    for left in range(piece.low, piece.high, width):
        right = min(left + width, piece.high)
        size = B * H * T * (right - left)
        x, p = (tile[:size].view(B, H, T, right - left) for tile in tiles)
        scores = x if q.dtype == x.dtype else torch.empty_like(x, dtype=q.dtype)
        _scores(rows, q, keys[:, left:right], negative, scores)
        _add_biases(rows, plan, piece, heads, left, right, scores)
        _hide(rows, plan, piece, left, right, scores)
        if rows.lse is None:
            most = scores.amax(3)
            if rows.sinks is not None:
                most = torch.maximum(most, rows.sinks[heads, None].to(most.dtype))
            most = most.where(most > MASKED / 2, 0.0)  # a row that sees nothing has none
            scores.sub_(most[..., None])
            below[there] = most
        torch.mul(scores, LOG2E, out=x)
        yield left, right, x, p


def _scores(rows: KernelRows, q: Tensor, k: Tensor, negative: Tensor | None, x: Tensor) -> None:
    """Scores, less the log-sum-exp where it is known, into `x`."""
    torch.bmm(q, k.transpose(1, 2), out=x.view(len(q), q.shape[1], -1))
    if rows.softcap is not None:
        x.div_(rows.softcap).tanh_().mul_(rows.softcap)
    if negative is not None:
        x.add_(negative)


def _add_biases(
    rows: KernelRows, plan: TilePlan, piece: Tile, heads: slice, left: int, right: int, x: Tensor
) -> None:
    """The biases by key, by distance and of links, into `x` [sequences, heads, rows, keys]."""
    if rows.key_bias is not None:
        some = piece.sequences if len(rows.key_bias) > 1 else slice(None)
        x.add_(rows.key_bias[some, heads, None, left:right])
    if rows.distance_bias is not None:
        table = rows.distance_bias[heads]
        key = "distance", piece, left, table.shape[1]
        if key not in plan.store.kept:
            own = plan.own[piece.sequences, piece.rows]
            if plan.first_own is not None:  # the same in all sequences
                own = own[:1]
            index = plan.store.keep(key, distance_index(own, left, right, table.shape[1]))[0]
        else:
            index = plan.store.kept[key][0]
        x.add_(table[:, index].transpose(0, 1))
    linked = link_bias(rows.links, piece.sequences, heads, piece.rows, slice(left, right))
    if linked is not None:
        x.add_(linked.clamp(min=MASKED))


def _hide(rows: KernelRows, plan: TilePlan, piece: Tile, left: int, right: int, x: Tensor) -> None:
    """Mask what a row does not see, on those of the keys `left … right` where there may be any."""
    spans = [(left, right)]
    if rows.real is None:
        from_, to = max(left, piece.clear_from), min(right, piece.clear_to)
        if from_ < to:
            spans = [(left, from_), (to, right)]
    for a, b in spans:
        if a < b:
            x[..., a - left : b - left].add_(_mask(rows, plan, piece, a, b))


def _mask(rows: KernelRows, plan: TilePlan, piece: Tile, left: int, right: int) -> Tensor:
    """float32 [sequences or 1, 1, rows, keys]: 0 where a row sees a key."""
    key: Any = "mask", piece, left
    if plan.alike and rows.real is None:
        key, piece = ("mask", piece.rows.start, left), replace(piece, sequences=slice(0, 1))
    if key in plan.store.kept:
        return plan.store.kept[key][0]
    seen = see(piece, left, right, plan.start, plan.stop, rows.real)
    mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, MASKED)
    return plan.store.keep(key, mask)[0]
