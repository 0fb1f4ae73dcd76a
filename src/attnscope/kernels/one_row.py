"""Numbers per row on any device: masses, chosen weights, entropies, largest scores.

Computes a few full rows of scores at a time, so memory is linear in the number of keys. Each row is
divided by its own sum. `triton.by_query` computes masses faster on a GPU.
`reference.by_query` is the definition.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from attnscope.kernels.autocast import without_autocast
from attnscope.kernels.call import LARGE, LOG2E
from attnscope.kernels.rows import KernelRows, score_bounds
from attnscope.kernels.scores import score_tiles
from attnscope.kernels.tile_plan import Tile

# Scores of one block: a few megabytes stay in a CPU's cache; a GPU wants work for every core.
SCORES = {"cpu": 1 << 19, "cuda": 1 << 26}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PerQueryRequest:
    """The numbers to compute for every row."""

    shares: Tensor | None = None
    """float [B, K, C]: the share of each key in each class."""
    keys: Tensor | None = None
    """int64 [B, M]: one key of each row; negative for none."""
    spans: Tensor | None = None
    """int64 [B, M, S, 2]: stretches of keys, each from its first to before its second number."""
    entropies: bool = False
    top: int = 0
    """How many of the largest entries."""

    def for_tile(self, tile: Tile) -> "PerQueryRequest":
        """The same of the rows of a piece, whose keys begin at its first."""
        rows = tile.sequences, tile.rows
        keys = None if self.keys is None else self.keys[rows] - tile.low
        if keys is not None:
            keys = keys.where(keys < tile.high - tile.low, -1)
        return replace(
            self,
            shares=None
            if self.shares is None
            else self.shares[tile.sequences, tile.low : tile.high],
            keys=keys,
            spans=None if self.spans is None else self.spans[rows] - tile.low,
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
    lse_error: Tensor | None = None
    """[B, H, M]: how far a row was from adding up to 1 under the log-sum-exp that the model's own
    attention had; None where that was not looked at."""


def renyi2(squares: Tensor) -> Tensor:
    """-ln sum_j A², from that sum; nan for a row that sees nothing."""
    return -squares.where(squares > 0, torch.nan).log()


@without_autocast
def of_weights(A: Tensor, request: PerQueryRequest, scores: Tensor | None = None) -> PerQueryResult:
    """What was asked for, of rows A [B, H, M, K] that exist; `scores` are -inf where unseen."""
    result: dict[str, Tensor] = {}
    if request.shares is not None:
        result["mass"] = A @ request.shares.to(A.dtype)[:, None]
    if request.keys is not None:
        chosen = request.keys[:, None, :, None]
        one = A.gather(3, chosen.clamp(min=0).expand(*A.shape[:3], 1))
        result["weight"] = (one * (chosen >= 0))[..., 0]
    if request.spans is not None:
        order = torch.arange(A.shape[3], device=A.device)
        result["spans"] = A.new_empty(*A.shape[:3], request.spans.shape[2])
        for s, ends in enumerate(request.spans.unbind(2)):
            first, last = ends[:, None, :, :1], ends[:, None, :, 1:]
            result["spans"][..., s] = (A * ((order >= first) & (order < last))).sum(3)
    if request.entropies:
        result["entropy"] = torch.special.entr(A).sum(3)
        result["squares"] = A.square().sum(3)
    if request.top:
        by = A.where(A > 0, -torch.inf) if scores is None else scores
        score, key = by.topk(min(request.top, A.shape[3]))
        result["top_weight"] = A.gather(3, key)
        result["top_key"] = key.where(score > -torch.inf, -1)
        known = (score > -torch.inf) & (scores is not None)
        result["top_score"] = score.where(known, torch.nan)
    return PerQueryResult(
        **{name: value if name == "top_key" else value.float() for name, value in result.items()}
    )


@without_autocast
def by_query(rows: KernelRows, request: PerQueryRequest) -> PerQueryResult:
    """What was asked for of these rows, never more than a few of them at once."""
    result = _empty_result(rows, request)
    if rows.q.shape[2] == 0:
        return result
    large = [[not size <= LARGE for size in each] for each in score_bounds(rows).tolist()]
    elements = SCORES.get(rows.q.device.type, SCORES["cpu"])
    for tile, heads, scores, A in score_tiles(rows, large, elements=elements, hidden=-torch.inf):
        _softmax(rows, heads, scores, A)
        some = of_weights(A, request.for_tile(tile), scores if request.top else None)
        index = tile.sequences, heads, tile.rows
        for each in fields(PerQueryResult):
            got, to = getattr(some, each.name), getattr(result, each.name)
            if to is not None and each.name.startswith("top"):
                where = tile.low if each.name == "top_key" else 0
                to[index][..., : got.shape[3]] = got + where * (got >= 0)
            elif to is not None:
                to[index] = got
    return result


def _empty_result(rows: KernelRows, request: PerQueryRequest) -> PerQueryResult:
    """What rows hold that see nothing."""
    B, H, M = rows.q.shape[:3]

    def new(*last: int, fill: float = 0.0) -> Tensor:
        return torch.full((B, H, M, *last), fill, dtype=torch.float32, device=rows.q.device)

    top = min(request.top, rows.k.shape[2])
    return PerQueryResult(
        mass=None if request.shares is None else new(request.shares.shape[2]),
        weight=None if request.keys is None else new(),
        spans=None if request.spans is None else new(request.spans.shape[2]),
        entropy=new() if request.entropies else None,
        squares=new() if request.entropies else None,
        top_key=new(top, fill=-1).long() if top else None,
        top_weight=new(top) if top else None,
        top_score=new(top, fill=torch.nan) if top else None,
    )


def _softmax(rows: KernelRows, heads: slice, x: Tensor, A: Tensor) -> None:
    """Write the weights of scores `x` into A, without the share of a learned sink; 0 in rows that
    see nothing."""
    most = x.amax(3, keepdim=True)
    sink = None
    if rows.sinks is not None:
        sink = rows.sinks[heads, None, None].to(x.dtype)
        most = torch.maximum(most, sink)
    most = most.where(most > -torch.inf, 0.0)
    torch.mul(torch.sub(x, most, out=A), LOG2E, out=A).exp2_()
    total = A.sum(3, keepdim=True)
    if sink is not None:
        total += (sink - most).exp_()
    A.div_(total.where(total > 0, 1.0))
