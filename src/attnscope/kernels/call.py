"""What crosses out of a model into the kernels, as plain data: one attention call and its rows.

Knows tensors and the definitions; must not know transformers, modules or files.

Tensors are named by shape throughout the kernels:
    B batch · H query heads · G key/value heads (H = G · R) · Q queries · K keys
    D size of a query or key · E size of a value · M counted queries (rows)
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

# Scores that may be larger than this are made in float64, or made again. Trained models stay below
# it, but for heads whose biases give them scores of hundreds or tens of thousands: of those float32
# rounds away what a weight is made of.
LARGE = 128.0
# So few rows are single rows.
SINGLE = 8
# Devices that do not know float64, in which kernels add up.
WITHOUT_FLOAT64 = {"mps"}

Form = Literal["causal", "full", "interval"]


@dataclass(eq=False, kw_only=True)
class VisibleRanges:
    """Which keys each query sees: the real keys `j` with `start[b, i] <= j < stop[b, i]`.

    Every mask of the models we know is such an interval (causal, windowed, chunked, packed,
    padded on either side), so two integers per query replace an n × n mask.
    """

    form: Form
    """How a fused kernel can be told: "causal" and "full" need no mask at all."""
    bounds: Callable[[], tuple[Tensor, Tensor]]
    """Makes `start` and `stop`, if they are ever needed."""
    real: Tensor | None = None
    """bool [B, K], given only when padding lies *inside* the intervals."""
    cache: dict[Any, Any] = field(default_factory=dict)
    """Where a kernel keeps what depends on the intervals alone; shared by layers."""

    @cached_property
    def _made(self) -> tuple[Tensor, Tensor]:
        return self.bounds()

    @property
    def start(self) -> Tensor:
        """int32 [B, Q], first visible key."""
        return self._made[0]

    @property
    def stop(self) -> Tensor:
        """int32 [B, Q], one past the last visible key; equal to `start` where nothing is seen."""
        return self._made[1]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreBias:
    """What somebody adds to the scores of some queries for some keys, in some heads."""

    bias: Tensor
    """float32 [B or 1, H or 1, K], added after scale, soft-cap and the model's own biases; -inf
    hides a key. No row that sees anything may lose all it sees."""
    queries: Tensor | None = None
    """bool [B, Q]: the queries meant; None for all of them. Of `KernelRows`: [B, M], the rows
    meant."""

    def among(self, index: Tensor | None) -> "ScoreBias":
        """The same for gathered rows, int64 [B, M]."""
        if index is None or self.queries is None:
            return self
        return replace(self, queries=self.queries.gather(1, index))


# Not frozen, which would take as long as a small layer: made once and not changed.
@dataclass(slots=True, eq=False, kw_only=True)
class AttentionCall:
    """One attention of one layer in one forward pass."""

    layer: int
    q: Tensor
    """[B, H, Q, D]"""
    k: Tensor
    """[B, G, K, D]"""
    v: Tensor
    """[B, G, K, E]"""
    scale: float
    visible: VisibleRanges
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`."""
    sinks: Tensor | None = None
    """[H], a learned score per head that takes part in the softmax and has no key."""
    key_bias: Tensor | None = None
    """[B or 1, H, K], added to every query's score of a key, after scale and soft-cap (ALiBi)."""
    distance_bias: Tensor | None = None
    """[H, 2 N + 1], added likewise: entry `N + d` to scores at distance `d = own - key`; the ends
    stand for all that lies beyond them (T5's relative positions)."""
    first: int = 0
    """Index among the keys of query 0's own token, for `distance_bias`; the others follow it."""
    bias: Tensor | None = None
    """[B or 1, H or 1, Q, K], added likewise. No kernel takes it: such a call is made densely."""
    links: tuple[ScoreBias, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KernelRows:
    """The rows of A that count: a call's queries, chosen, weighted and ready for a kernel.

    Every kernel takes every legal combination. Legal are:
    - `start`, `stop` and `own`: all three, or none; none only with `causal`. With all three and
      `causal`, they are what `filled` would make.
    - `causal`: M + `shift` <= K. Keys after the last row's own are visible to no row. `causal`
      does not exclude holes (`real`), `links`, `weight`, `group` or `shrink`.
    - `shift`: 0 without `causal`.
    - an interval: 0 <= `start` <= `stop` <= K; `own` may lie outside it, and outside the keys.
    - `lse` in float32: rows are whole. In float64: rows may be parts of rows.
    - `shrink`: M is even, and the rows of a pair have the same weight.
    - `group` with `groups` > 0, both or neither.
    - M = 0, and rows that see nothing.
    - `cache`: rows that share it differ in their tensors `q`, `k`, `lse`, `real` and `links` alone.

    Only `triangular` may spare a kernel its masks.
    """

    q: Tensor
    """[B, H, M, D]"""
    k: Tensor
    """[B, G, K, D]"""
    scale: float
    causal: bool = False
    """Queries in order, each with the interval of keys up to its own. There may be holes in it."""
    shift: int = 0
    """Of causal rows: where the own token of the first stands among the keys."""
    start: Tensor | None = None
    """int32 [B, M]: as in `VisibleRanges`; equal to `stop` for a row that does not count."""
    stop: Tensor | None = None
    """int32 [B, M]"""
    own: Tensor | None = None
    """int32 [B, M]: the index of the query's own token among the keys."""
    lse: Tensor | None = None
    """[B, H, M]: log-sum-exp of the visible scores, sink included, if already known; 0 for a row
    that sees nothing. In float32 as a fused operator returns it: rows are whole, and kernels make
    it anew where scores are large. In float64 as `refine` returns it: rows may be parts of rows."""
    real: Tensor | None = None
    """bool [B, K], as in `VisibleRanges`."""
    softcap: float | None = None
    sinks: Tensor | None = None
    key_bias: Tensor | None = None
    """As in `AttentionCall`."""
    distance_bias: Tensor | None = None
    """As in `AttentionCall`; distances are counted from `own`."""
    links: tuple[ScoreBias, ...] = ()
    weight: Tensor | None = None
    """float32 [B, M]: how many queries a row stands for; None means one each."""
    shrink: Tensor | None = None
    """float32 [B, M / 2], for sampled rows: rows 2m and 2m + 1 are the two draws of a stratum,
    and `shrink` is its finite-population factor (1 - 2 / stratum size)."""
    group: Tensor | None = None
    """int64 [B, M], in `0 … groups - 1` or -1: the class of the query, for flow."""
    groups: int = 0
    cache: dict[Any, Any] = field(default_factory=dict)
    """As in `VisibleRanges`."""

    @property
    def triangular(self) -> bool:
        """Whether each row sees all keys up to its own: causal, and without a hole."""
        return self.causal and self.real is None

    def filled(self) -> "KernelRows":
        """These rows with their bounds spelled out; rows with one cache share them."""
        if self.start is not None:
            return self
        assert self.causal
        B, _, M, _ = self.q.shape
        key = "bounds", B, M, self.shift
        if key not in self.cache:
            own = torch.arange(M, dtype=torch.int32, device=self.q.device)
            own = (own + self.shift).expand(B, -1).contiguous()
            self.cache[key] = torch.zeros_like(own), own + 1, own
        start, stop, own = self.cache[key]
        return replace(self, start=start, stop=stop, own=own)

    def one(self, sequence: int, row: int) -> "KernelRows":
        """A single row, B = M = 1, by itself."""
        start, stop, own = self.bounds()
        b, m = slice(sequence, sequence + 1), slice(row, row + 1)

        def of(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[b] if len(value) > 1 else value

        links = [
            ScoreBias(
                bias=link.bias[b] if len(link.bias) > 1 else link.bias,
                queries=None if link.queries is None else link.queries[b, m],
            )
            for link in self.links
        ]
        return KernelRows(
            q=self.q[b, :, m],
            k=self.k[b],
            scale=self.scale,
            start=start[b, m],
            stop=stop[b, m],
            own=own[b, m],
            real=None if self.real is None else self.real[b],
            softcap=self.softcap,
            sinks=self.sinks,
            key_bias=of(self.key_bias),
            distance_bias=self.distance_bias,
            links=tuple(links),
        )

    def bounds(self) -> tuple[Tensor, Tensor, Tensor]:
        """`start`, `stop` and `own`."""
        rows = self.filled()
        assert rows.start is not None
        assert rows.stop is not None
        assert rows.own is not None
        return rows.start, rows.stop, rows.own


# Not frozen, as `AttentionCall`.
@dataclass(slots=True, eq=False, kw_only=True)
class AttentionSums:
    """Sums over the rows that count, each row times its weight."""

    received: Tensor
    """float32 [B, H, K]: sum of A[i, j]."""
    later: Tensor
    """float32 [B, H, K]: the same over queries after the key, i > j."""
    mass: Tensor
    """float32 [B, H]: sum of `received` over the keys, for the conservation check."""
    entropy: Tensor
    """float32 [B, H]: sum over rows of -sum_j A ln A."""
    own: Tensor
    """float32 [B, H]: sum of A[i, i]."""
    lse: Tensor | None = None
    """float32 or float64 [B, H, M]: the log-sum-exp used, given or computed."""
    drift: Tensor | None = None
    """float32 [B, H]: how far the given log-sum-exp was from the rows' own, at most; None where
    they were not compared."""
    reach: Tensor | None = None
    """float32 [B, H]: no score was larger than this. Rounding goes with it."""
    unseen_mass: Tensor | None = None
    """float32 [B, H]: the most that a key received which no row sees, 0 unless a kernel is wrong;
    None where every key is seen, and as kernels return it: the caller compares."""
    unseen_key: Tensor | None = None
    """int64 [B, H]: that key."""
    variance: Tensor | None = None
    """float32 [B, H, K]: of `received`, where rows are sampled."""
    entropy_variance: Tensor | None = None
    """float32 [B, H]"""
    flow: Tensor | None = None
    """float32 [B, H, groups, K]: `received` from each group of queries."""


def distance_index(own: Tensor, left: int, right: int, size: int) -> Tensor:
    """int64 [..., keys]: where the distances from `own` [...] to the keys `left … right` stand in a
    `distance_bias` of this size."""
    keys = torch.arange(left, right, device=own.device)
    return (own[..., None].long() - keys + size // 2).clamp_(0, size - 1)


def link_bias(
    links: tuple[ScoreBias, ...], sequences: slice, heads: slice, rows: slice, keys: slice
) -> Tensor | None:
    """float32, broadcast to [sequences, heads, rows, keys]: what links add to these scores."""
    total = None
    for link in links:
        some = sequences if len(link.bias) > 1 else slice(None)
        bias = link.bias[some, heads if link.bias.shape[1] > 1 else slice(None), None, keys]
        if link.queries is not None:
            bias = torch.where(link.queries[sequences, None, rows, None], bias, 0.0)
        total = bias if total is None else total + bias
    return total


def reach_of(rows: KernelRows) -> Tensor:
    """float32 [B, G]: no score of these heads is larger than this, nor was it before a soft-cap;
    not finite where a query or key is not."""
    B, G = rows.k.shape[:2]
    if rows.q.shape[2] == 0:
        return torch.zeros(B, G, device=rows.k.device)
    q, k = (torch.linalg.vector_norm(t, dim=-1).float() for t in (rows.q, rows.k))
    reach: Tensor = q.reshape(B, G, -1).amax(-1) * k.amax(-1) * abs(rows.scale)
    if rows.key_bias is not None:
        most = rows.key_bias.float().abs().amax(-1)
        reach = reach + most.reshape(len(most), G, -1).amax(-1)
    if rows.distance_bias is not None:
        reach = reach + rows.distance_bias.float().abs().amax(-1).view(G, -1).amax(-1)
    for link in rows.links:  # a hidden key has no score
        reach = reach + link.bias.abs().where(link.bias > -torch.inf, 0.0).amax()
    return reach


@cache
def has_triton() -> bool:
    """Whether the Triton kernels can be imported here."""
    return find_spec("triton") is not None
