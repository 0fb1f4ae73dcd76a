"""What every single row holds, told row by row: masses, chosen weights, entropies, largest scores.

A few whole rows of scores at a time, so memory goes with the keys and never with their square; each
row is divided by its own sum. Runs on any device; `triton.by_query` makes masses faster on a GPU.
`reference.by_query` is the definition.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from attnscope.kernels.autocast import without_autocast
from attnscope.kernels.call import LARGE, KernelRows, distance_index, link_bias, reach_of
from attnscope.kernels.tile_plan import Tile, cut, even, see

# Scores of one block: a few megabytes stay in a CPU's cache; a GPU wants work for every core.
SCORES = {"cpu": 1 << 19, "cuda": 1 << 26}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PerQueryRequest:
    """What to tell of every row."""

    shares: Tensor | None = None
    """float [B, K, C]: the share of each key in each class."""
    keys: Tensor | None = None
    """int64 [B, M]: one key of each row; negative for none."""
    spans: Tensor | None = None
    """int64 [B, M, S, 2]: stretches of keys, each from its first to before its second number."""
    entropies: bool = False
    top: int = 0
    """How many of the largest entries."""

    def part(self, piece: Tile) -> "PerQueryRequest":
        """The same of the rows of a piece, whose keys begin at its first."""
        rows = piece.sequences, piece.rows
        keys = None if self.keys is None else self.keys[rows] - piece.low
        if keys is not None:
            keys = keys.where(keys < piece.high - piece.low, -1)
        return replace(
            self,
            shares=None
            if self.shares is None
            else self.shares[piece.sequences, piece.low : piece.high],
            keys=keys,
            spans=None if self.spans is None else self.spans[rows] - piece.low,
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PerQueryResult:
    """What was asked for, float32; 0 of rows that see nothing."""

    mass: Tensor | None = None
    """[B, H, M, C]: the sum of A over the keys of each class."""
    weight: Tensor | None = None
    """[B, H, M]: A on the chosen key; 0 where there is none."""
    spans: Tensor | None = None
    """[B, H, M, S]: the sum of A over each stretch."""
    entropy: Tensor | None = None
    """[B, H, M]: -sum_j A ln A."""
    squares: Tensor | None = None
    """[B, H, M]: sum_j A²."""
    top_key: Tensor | None = None
    """int64 [B, H, M, k], largest first; -1 where no more are seen."""
    top_weight: Tensor | None = None
    """[B, H, M, k]"""
    top_score: Tensor | None = None
    """[B, H, M, k]: as the softmax took it, scaled, capped and biased; nan where none is seen, or
    where only the weights are known."""
    drift: Tensor | None = None
    """[B, H, M]: how far a row was from adding up to 1 under the log-sum-exp that the model's own
    attention had; None where that was not looked at."""


def renyi2(squares: Tensor) -> Tensor:
    """-ln sum_j A², from that sum; nan for a row that sees nothing."""
    return -squares.where(squares > 0, torch.nan).log()


@without_autocast
def of_weights(A: Tensor, asked: PerQueryRequest, scores: Tensor | None = None) -> PerQueryResult:
    """What was asked for, of rows A [B, H, M, K] that exist; `scores` are -inf where unseen."""
    found: dict[str, Tensor] = {}
    if asked.shares is not None:
        found["mass"] = A @ asked.shares.to(A.dtype)[:, None]
    if asked.keys is not None:
        there = asked.keys[:, None, :, None]
        one = A.gather(3, there.clamp(min=0).expand(*A.shape[:3], 1))
        found["weight"] = (one * (there >= 0))[..., 0]
    if asked.spans is not None:
        order = torch.arange(A.shape[3], device=A.device)
        found["spans"] = A.new_empty(*A.shape[:3], asked.spans.shape[2])
        for s, ends in enumerate(asked.spans.unbind(2)):
            first, last = ends[:, None, :, :1], ends[:, None, :, 1:]
            found["spans"][..., s] = (A * ((order >= first) & (order < last))).sum(3)
    if asked.entropies:
        found["entropy"] = torch.special.entr(A).sum(3)
        found["squares"] = A.square().sum(3)
    if asked.top:
        by = A.where(A > 0, -torch.inf) if scores is None else scores
        score, key = by.topk(min(asked.top, A.shape[3]))
        found["top_weight"] = A.gather(3, key)
        found["top_key"] = key.where(score > -torch.inf, -1)
        known = (score > -torch.inf) & (scores is not None)
        found["top_score"] = score.where(known, torch.nan)
    return PerQueryResult(
        **{name: value if name == "top_key" else value.float() for name, value in found.items()}
    )


@without_autocast
def by_query(rows: KernelRows, asked: PerQueryRequest) -> PerQueryResult:
    """What was asked for of these rows, never more than a few of them at once."""
    found = _nothing(rows, asked)
    if rows.q.shape[2] == 0:
        return found
    for piece, heads, scores in _blocks(rows):
        A = _softmax(rows, heads, scores)
        some = of_weights(A, asked.part(piece), scores if asked.top else None)
        there = piece.sequences, heads, piece.rows
        for each in fields(PerQueryResult):
            got, to = getattr(some, each.name), getattr(found, each.name)
            if to is not None and each.name.startswith("top"):
                where = piece.low if each.name == "top_key" else 0
                to[there][..., : got.shape[3]] = got + where * (got >= 0)
            elif to is not None:
                to[there] = got
    return found


def _nothing(rows: KernelRows, asked: PerQueryRequest) -> PerQueryResult:
    """What rows hold that see nothing."""
    B, H, M = rows.q.shape[:3]

    def new(*last: int, fill: float = 0.0) -> Tensor:
        return torch.full((B, H, M, *last), fill, dtype=torch.float32, device=rows.q.device)

    top = min(asked.top, rows.k.shape[2])
    return PerQueryResult(
        mass=None if asked.shares is None else new(asked.shares.shape[2]),
        weight=None if asked.keys is None else new(),
        spans=None if asked.spans is None else new(asked.spans.shape[2]),
        entropy=new() if asked.entropies else None,
        squares=new() if asked.entropies else None,
        top_key=new(top, fill=-1).long() if top else None,
        top_weight=new(top) if top else None,
        top_score=new(top, fill=torch.nan) if top else None,
    )


def _blocks(rows: KernelRows) -> Iterator[tuple[Tile, slice, Tensor]]:
    """Rows of some sequences and heads, with their scores over the keys that any of them sees
    [sequences, heads, rows, keys], -inf where one does not; in float64 where they are large."""
    B, H, M, _ = rows.q.shape
    G, K = rows.k.shape[1:3]
    R = H // G
    room = SCORES.get(rows.q.device.type, SCORES["cpu"])
    step = even(M, max(1, room // (R * K)))
    blocks = max(1, room // (R * step * K))
    groups, sequences = min(G, blocks), even(B, max(1, blocks // G))
    large = [[not size <= LARGE for size in each] for each in reach_of(rows).tolist()]
    start, stop, own = rows.bounds()
    for pieces in cut(start, stop, sequences, step):
        some = pieces[0].sequences
        for g in range(0, G, groups):
            kv = slice(g, min(g + groups, G))
            wide = any(any(each[kv]) for each in large[some])
            keys = rows.k[some, kv].to(torch.float64 if wide else torch.float32)
            heads = slice(g * R, kv.stop * R)
            for piece in pieces:
                if not piece.empty:
                    yield piece, heads, _scores(rows, keys, piece, heads, (start, stop, own))


def _scores(
    rows: KernelRows, keys: Tensor, piece: Tile, heads: slice, bounds: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    start, stop, own = bounds
    q = rows.q[piece.sequences, heads, piece.rows].to(keys.dtype)
    B, H, T, D = q.shape
    G, low, high = keys.shape[1], piece.low, piece.high
    x = q.reshape(B, G, -1, D) @ keys[:, :, low:high].transpose(2, 3)
    x = x.view(B, H, T, high - low).mul_(rows.scale)
    if rows.softcap is not None:
        x.div_(rows.softcap).tanh_().mul_(rows.softcap)
    if rows.key_bias is not None:
        some = piece.sequences if len(rows.key_bias) > 1 else slice(None)
        x += rows.key_bias[some, heads, None, low:high]
    if rows.distance_bias is not None:
        table = rows.distance_bias[heads]
        index = distance_index(own[piece.sequences, piece.rows], low, high, table.shape[1])
        x += table[:, index].transpose(0, 1)
    linked = link_bias(rows.links, piece.sequences, heads, piece.rows, slice(low, high))
    if linked is not None:
        x += linked
    if rows.real is None and piece.clear(low, high):
        return x
    return x.masked_fill_(~see(piece, low, high, start, stop, rows.real), -torch.inf)


def _softmax(rows: KernelRows, heads: slice, x: Tensor) -> Tensor:
    """A, with what a learned sink takes left out; 0 in rows that see nothing."""
    most = x.amax(3, keepdim=True)
    sink = None
    if rows.sinks is not None:
        sink = rows.sinks[heads, None, None].to(x.dtype)
        most = torch.maximum(most, sink)
    most = most.where(most > -torch.inf, 0.0)
    A = (x - most).exp_()
    total = A.sum(3, keepdim=True)
    if sink is not None:
        total += (sink - most).exp_()
    return A.div_(total.where(total > 0, 1.0))
