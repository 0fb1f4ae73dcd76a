"""The streamed kernel in plain torch: pieces of a batch against blocks of keys, on any device.

With the log-sum-exp of each row in hand (the fused attention returns it) a tile costs one matrix
product, one exponential and one sum. Scores are kept in units of log2 because `exp2` is the
fastest exponential torch has, and the log-sum-exp is subtracted inside the product: queries carry
it as one more dimension. Masks are added before the product rather than filled in after it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnscope.kernels.call import Rows, Totals, distance_index
from attnscope.kernels.pieces import Piece, Store, cut, even, see

__all__ = ["reduce"]

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# Stands for minus infinity in masked scores: its exponential is 0, and 0 times it is 0, not nan.
MASKED = -1.0e30
# Elements of one tile: two megabytes of float32 stay in the cache. And its keys, in long texts.
TILE, TILE_KEYS = 1 << 19, 256
# Rows of a piece: the fewer, the less of a causal piece is in its future.
FEW, MANY = 32, 128
# Texts up to this length are not cut along the keys.
SHORT = 512
# Largest block of scores when a row must be seen whole (no log-sum-exp yet).
WHOLE_ROWS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plan:
    """What is the same for all layers that share these rows."""

    given: tuple[Tensor | None, ...]
    """The bounds this was made from, to know them again."""
    start: Tensor
    stop: Tensor
    own: Tensor
    width: int
    """Keys of a tile."""
    groups: int
    """Key/value heads of a tile."""
    size: int
    """Elements of a tile."""
    pieces: list[list[tuple[Piece, Piece]]]
    """Each piece with another of the same rows, in which a row sees its own token alone."""
    backward: bool
    """No row sees a key after its own token; so, of its own and later keys, it sees its own."""
    first_own: int | None
    """Where the tokens of the rows begin, if they stand in order and alike in all sequences."""
    store: Store


def reduce(rows: Rows) -> Totals:
    """All totals of these rows, without ever holding more than one tile of scores."""
    B, H, M, D = rows.q.shape
    G, K = rows.k.shape[1], rows.k.shape[2]
    new, sampled = rows.q.new_zeros, rows.shrink is not None
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
    plan = _plan(rows)
    carried = rows.lse is not None and rows.softcap is None
    own = new((B, H, M), dtype=torch.float32)
    # Two tiles for all: fresh memory for each would cost as much as the arithmetic.
    tiles = rows.q.new_empty((2, plan.size), dtype=torch.float32)
    for pieces in plan.pieces:
        some = rows.k[pieces[0][0].sequences]
        keys = some.new_empty((*some.shape[:3], D + carried), dtype=torch.float32)
        torch.mul(some.float(), rows.scale * LOG2E, out=keys[..., :D])
        if carried:
            keys[..., D] = -LOG2E
        for piece, owners in pieces:
            if piece.empty:
                continue
            for g in range(0, G, plan.groups):
                heads = slice(g, g + plan.groups)
                _block(rows, plan, sums, own, keys, tiles, piece, owners, heads)
    torch.sum(sums.received, -1, out=sums.mass)
    torch.sum(own, -1, out=sums.own)
    if plan.backward and plan.first_own is not None:
        sums.later[..., plan.first_own : plan.first_own + M] = own
    elif plan.backward:
        where = plan.own.clamp(0, K - 1).long()[:, None].expand(B, H, M)
        sums.later.scatter_add_(2, where, own)
    torch.sub(sums.received, sums.later, out=sums.later).clamp_(min=0)
    sums.entropy.mul_(-LN2)
    return sums


def _plan(rows: Rows) -> Plan:
    """How to cut these rows; made once for all layers that share them."""
    B, H, M, _ = rows.q.shape
    G, K = rows.k.shape[1], rows.k.shape[2]
    R, known = H // G, rows.lse is not None
    key = "streaming", B, H, G, M, K, known
    given = rows.start, rows.stop, rows.own, rows.real, rows.group
    made: Plan | None = rows.cache.get(key)
    if made is not None and all(a is b for a, b in zip(made.given, given, strict=True)):
        return made
    if known:
        room, width = TILE, K if K <= SHORT else TILE_KEYS
        step = min(MANY, max(FEW, K // 4, room // (B * H * K)))
    else:
        room, width = WHOLE_ROWS, K
        step = min(MANY, max(2, room // (R * K)))
    step = even(M, step)
    step += step % 2  # the two draws of a stratum stay in one piece
    if known:
        width = min(K, max(width, room // (B * H * step)))
    blocks = max(1, room // (R * step * width))
    groups, sequences = min(G, blocks), even(B, blocks // G)
    start, stop, own = rows.bounds()
    pieces = cut(start, stop, sequences, step), cut(own, own + 1, sequences, step)
    order = own[:1, :1] + torch.arange(M, device=own.device, dtype=own.dtype)
    first = int(own[0, 0])
    in_order = 0 <= first <= K - M and bool((own == order).all())
    made = Plan(
        given=given,
        start=start,
        stop=stop,
        own=own,
        width=width,
        groups=groups,
        size=sequences * groups * R * step * width,
        pieces=[list(zip(*same, strict=True)) for same in zip(*pieces, strict=True)],
        backward=bool((stop <= own + 1)[stop > start].all()),
        first_own=first if in_order else None,
        store=Store(),
    )
    rows.cache[key] = made
    return made


def _block(
    rows: Rows,
    plan: Plan,
    sums: Totals,
    own: Tensor,
    keys: Tensor,
    tiles: Tensor,
    piece: Piece,
    owners: Piece,
    groups: slice,
) -> None:
    """One piece and some groups of heads, against all the keys [sequences, G, K, D] it sees.

    Until `reduce` turns it round, `sums.later` holds what came from queries *not* after the key:
    there are few of those, so most tiles need not be added twice.
    """
    R, lse = rows.q.shape[1] // keys.shape[1], rows.lse
    heads = slice(groups.start * R, min(groups.stop, keys.shape[1]) * R)
    there = piece.sequences, heads, piece.rows
    given = rows.q[there]
    B, H, T, D = given.shape
    keys = keys[:, groups].flatten(0, 1)
    q = given.new_empty((B, H, T, keys.shape[2]), dtype=torch.float32)
    q[..., :D] = given
    negative = None
    if lse is not None and keys.shape[2] > D:
        q[..., D] = lse[there]
    elif lse is not None:
        negative = lse[there][..., None] * -LOG2E
    q = q.view(len(keys), R * T, -1)
    weight = None
    if rows.weight is not None:
        weight = rows.weight[piece.sequences, None, piece.rows, None]
    row_entropy = q.new_zeros(B, H, T) if rows.shrink is not None else None
    width = plan.width if lse is not None else piece.high - piece.low
    for left in range(piece.low, piece.high, width):
        right = min(left + width, piece.high)
        size = B * H * T * (right - left)
        x, p = (tile[:size].view(B, H, T, right - left) for tile in tiles)
        bias = _bias(rows, plan, piece, left, right)
        _scores(rows, q, keys[:, left:right], negative, bias, x)
        _add_biases(rows, plan, piece, heads, left, right, x)
        if lse is None:
            x.sub_(_log_sum(rows, sums, x, there)[..., None])
            if bias is not None:  # which the log-sum-exp of a row that sees nothing undid
                x.add_(bias)
        torch.exp2(x, out=p)
        if weight is not None:
            p.mul_(weight)
        sums.received[piece.sequences, heads, left:right] += p.sum(2)
        x.mul_(p)
        if row_entropy is None:
            sums.entropy[piece.sequences, heads] += x.sum((2, 3))
        else:
            row_entropy += x.sum(3)
        if owners.low < right and left < owners.high:
            where, at_own = _own(plan, piece, left, right)
            own[there] += p.gather(3, where.expand(B, H, T, 1)).mul_(at_own)[..., 0]
        if not plan.backward:
            columns = torch.arange(left, right, device=q.device, dtype=torch.int32)
            before = plan.own[piece.sequences, None, piece.rows, None] <= columns
            sums.later[piece.sequences, heads, left:right] += (p * before).sum(2)
        if rows.group is not None and sums.flow is not None:
            member = _member(rows, rows.group, plan, piece)
            sums.flow[piece.sequences, heads, :, left:right] += member @ p
        if rows.shrink is not None and sums.variance is not None:
            gap = p[:, :, 0::2] - p[:, :, 1::2]
            gap.square_().mul_(_shrink(rows.shrink, piece)[..., None])
            sums.variance[piece.sequences, heads, left:right] += gap.sum(2)
    if row_entropy is None:
        return
    assert rows.shrink is not None
    assert sums.entropy_variance is not None
    sums.entropy[piece.sequences, heads] += row_entropy.sum(2)
    gap = (row_entropy[..., 0::2] - row_entropy[..., 1::2]) * LN2
    gap.square_().mul_(_shrink(rows.shrink, piece))
    sums.entropy_variance[piece.sequences, heads] += gap.sum(2)


def _scores(
    rows: Rows, q: Tensor, k: Tensor, negative: Tensor | None, bias: Tensor | None, x: Tensor
) -> None:
    """Scores in log2 units, masked, less the log-sum-exp where it is known, into `x`."""
    out = x.view(len(q), q.shape[1], -1)
    k = k.transpose(1, 2)
    if rows.softcap is None and bias is not None:
        x.copy_(bias.expand_as(x))
        out.baddbmm_(q, k)
    else:
        torch.bmm(q, k, out=out)
    if rows.softcap is not None:
        cap = rows.softcap * LOG2E
        x.div_(cap).tanh_().mul_(cap)
        if bias is not None:
            x.add_(bias)
    if negative is not None:
        x.add_(negative)


def _add_biases(
    rows: Rows, plan: Plan, piece: Piece, heads: slice, left: int, right: int, x: Tensor
) -> None:
    """The biases by key and by distance, into `x` [sequences, heads, rows, keys]."""
    if rows.key_bias is not None:
        some = piece.sequences if len(rows.key_bias) > 1 else slice(None)
        x.add_(rows.key_bias[some, heads, None, left:right], alpha=LOG2E)
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
        x.add_(table[:, index].transpose(0, 1), alpha=LOG2E)


def _log_sum(rows: Rows, sums: Totals, x: Tensor, there: tuple[slice, slice, slice]) -> Tensor:
    """The rows' log-sum-exp in log2 units, from whole rows of scores; kept in `sums`."""
    lse = torch.logsumexp(x * LN2, -1)
    if rows.sinks is not None:
        lse = torch.logaddexp(lse, rows.sinks[there[1], None].float())
    lse = lse.where(lse > MASKED / 2, 0.0)  # a row that sees nothing has none
    assert sums.lse is not None
    sums.lse[there] = lse
    return lse * LOG2E


def _bias(rows: Rows, plan: Plan, piece: Piece, left: int, right: int) -> Tensor | None:
    """float32 [sequences, 1, rows, keys]: 0 where a row sees a key; None where all see all."""
    if rows.real is None and piece.clear(left, right):
        return None
    key = "bias", piece, left
    if key in plan.store.kept:
        return plan.store.kept[key][0]
    seen = see(piece, left, right, plan.start, plan.stop, rows.real)
    bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, MASKED)
    return plan.store.keep(key, bias)[0]


def _own(plan: Plan, piece: Piece, left: int, right: int) -> tuple[Tensor, ...]:
    """Where rows find their own tokens among these keys [sequences, 1, rows, 1], and a 1 for each
    that does."""
    key = "own", piece, left
    if key in plan.store.kept:
        return plan.store.kept[key]
    own = plan.own[piece.sequences, None, piece.rows, None].long() - left
    found = (own >= 0) & (own < right - left)
    return plan.store.keep(key, own.clamp_(0, right - left - 1), found.float())


def _member(rows: Rows, group: Tensor, plan: Plan, piece: Piece) -> Tensor:
    """float32 [sequences, 1, classes, rows]: 1 where a row is of a class."""
    key = "member", piece
    if key in plan.store.kept:
        return plan.store.kept[key][0]
    classes = torch.arange(rows.groups, device=group.device)[:, None]
    member = (group[piece.sequences, None, None, piece.rows] == classes).float()
    return plan.store.keep(key, member)[0]


def _shrink(shrink: Tensor, piece: Piece) -> Tensor:
    """[sequences, 1, strata]"""
    return shrink[piece.sequences, None, piece.rows.start // 2 : piece.rows.stop // 2]
