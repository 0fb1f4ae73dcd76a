"""The input and output of the kernels: an attention call, its rows, and the sums over them.

Names of dimensions in all kernels:
    B batch · H query heads · G key/value heads (H = G · R) · Q queries · K keys
    D size of a query or key · E size of a value · M counted queries (rows)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

LOG2E = math.log2(math.e)  # exp2 is the fastest exponential
# Scores that may be larger than this are computed in float64. Most heads of trained models stay
# below it. The biases of a few heads give scores of hundreds to tens of thousands, where float32
# rounds away the digits that decide a weight.
LARGE = 128.0
# Up to this many rows, the CPU computes products in float64: it costs little.
SINGLE = 8
# Devices without float64, which the kernels use for sums.
WITHOUT_FLOAT64 = {"mps"}

Form = Literal["causal", "full", "interval"]


@dataclass(eq=False, kw_only=True)
class VisibleRanges:
    """The keys each query sees: the real keys `j` with `start[b, i] <= j < stop[b, i]`.

    All supported masks are such intervals (causal, windowed, chunked, packed, padded on either
    side), so two integers per query replace an n × n mask.
    """

    form: Form
    """The mask argument of a fused kernel: "causal" and "full" need no mask tensor."""
    bounds: Callable[[], tuple[Tensor, Tensor]]
    """Computes `start` and `stop` on first use."""
    real: Tensor | None = None
    """bool [B, K]: False at padding; None unless padding lies inside the intervals."""
    cache: dict[Any, Any] = field(default_factory=dict)
    """Cache of values that depend on the intervals alone; shared by layers."""

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        return self.bounds()

    @property
    def start(self) -> Tensor:
        """int32 [B, Q], first visible key."""
        return self._bounds[0]

    @property
    def stop(self) -> Tensor:
        """int32 [B, Q], one past the last visible key; equal to `start` if no key is visible."""
        return self._bounds[1]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoreBias:
    """A bias that an intervention adds to the scores of some queries, keys and heads."""

    bias: Tensor
    """float32 [B or 1, H or 1, K], added after scale, soft-cap and the model's biases; -inf
    hides a key. A row with visible keys must keep at least one."""
    queries: Tensor | None = None
    """bool [B, Q]: the queries that get the bias; None for all. In `KernelRows`: [B, M], the
    rows."""


# Not frozen: the constructor of a frozen dataclass takes as long as a small layer. No field of
# these types is changed after construction.
@dataclass(slots=True, eq=False, kw_only=True)
class ScoreSpec:
    """How scores follow from queries and keys, and which keys each query sees."""

    scale: float
    """Factor of the dot products; nan if only the weights are known."""
    visible: VisibleRanges
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`."""
    sinks: Tensor | None = None
    """[H], a learned sink: a score per head in the softmax without a key."""
    key_bias: Tensor | None = None
    """[B or 1, H, K], added to every query's score of a key, after scale and soft-cap (ALiBi)."""
    distance_bias: Tensor | None = None
    """[H, 2 N + 1], added likewise: entry `N + d` at distance `d = self_key - key`. The first and
    last entries also apply to larger distances (relative positions of T5)."""
    score_biases: tuple[ScoreBias, ...] = ()

    @property
    def biased(self) -> bool:
        """Whether the scores have a bias."""
        return not (self.key_bias is None and self.distance_bias is None and not self.score_biases)


@dataclass(slots=True, eq=False, kw_only=True)
class AttentionCall(ScoreSpec):
    """One attention call: one layer in one forward pass."""

    layer: int
    q: Tensor
    """[B, H, Q, D]"""
    k: Tensor
    """[B, G, K, D]"""
    v: Tensor
    """[B, G, K, E]"""
    first: int = 0
    """Index of query 0 among the keys, for `distance_bias`; the other queries follow it."""
    bias: Tensor | None = None
    """[B or 1, H or 1, Q, K], added likewise. Kernels do not support it: the call runs densely."""


@dataclass(slots=True, eq=False, kw_only=True)
class RowBlock:
    """Which queries of a call a kernel reduces, what they see, and how they count.

    All layers with the same mask share a block and its cache.
    """

    index: Tensor | None = None
    """int64 [B, M]: the queries; None for all in order, or for `single_row`."""
    single_row: int | None = None
    """The query, if the rows are the same single query of every sequence."""
    causal: bool = False
    """Queries in order, each with the keys up to its own token. `real` may add gaps."""
    diagonal_offset: int = 0
    """For causal rows: index of the first row's token among the keys."""
    start: Tensor | None = None
    """int32 [B, M]: as in `VisibleRanges`; equal to `stop` for a row to skip."""
    stop: Tensor | None = None
    """int32 [B, M]"""
    self_key: Tensor | None = None
    """int32 [B, M]: index of the query's own token among the keys."""
    partial: bool = False
    """Rows cover only some of the keys that their queries see, and `lse` is that of whole rows,
    from `exact_lse`. Kernels do not divide such rows by their sum."""
    weight: Tensor | None = None
    """float32 [B, M]: the number of queries that a row represents; None for one each."""
    fpc: Tensor | None = None
    """float32 [B, M / 2], for sampled rows: finite-population correction (1 - 2 / stratum size).
    Rows 2m and 2m + 1 are the two draws of a stratum."""
    group: Tensor | None = None
    """int64 [B, M], in `0 … groups - 1` or -1: the class of the query, for flow."""
    cache: dict[Any, Any] = field(default_factory=dict)
    """As in `VisibleRanges`."""

    def take(self, tensor: Tensor, dim: int) -> Tensor:
        """These rows of a tensor [B, …] that has an entry for every query in dimension `dim`."""
        if self.single_row is not None:
            return tensor.narrow(dim, self.single_row, 1)
        if self.index is None:
            return tensor
        shape = [len(tensor), *[1] * (tensor.ndim - 1)]
        shape[dim] = self.index.shape[1]
        index = self.index.to(tensor.device).view(shape)
        return tensor.gather(dim, index.expand(*tensor.shape[:dim], -1, *tensor.shape[dim + 1 :]))

    def repeat(self, n: int) -> "RowBlock":
        """The same rows for a batch that is stacked `n` times."""
        if n == 1:
            return self
        if ("repeat", n) not in self.cache:
            each: dict[str, Any] = {
                name: None if (value := getattr(self, name)) is None else value.repeat(n, 1)
                for name in ("index", "start", "stop", "self_key", "weight", "fpc", "group")
            }
            self.cache["repeat", n] = replace(self, cache={}, **each)
        repeated: RowBlock = self.cache["repeat", n]
        return repeated


@dataclass(slots=True, eq=False, kw_only=True)
class KernelRows(RowBlock):
    """The attention rows to reduce: a block of rows with the tensors of a call.

    `q`, `lse` and the `queries` of score biases have M rows, those of the block. Every kernel
    supports every legal combination. Legal are:
    - `start`, `stop` and `self_key`: all three, or none; none only with `causal`. With all three
      and `causal`, they equal those of `bounds`.
    - `causal`: M + `diagonal_offset` <= K. No row sees keys after the token of the last row.
      `causal` allows gaps (`real`), `score_biases`, `weight`, `group` and `fpc`.
    - `diagonal_offset`: 0 without `causal`.
    - an interval: 0 <= `start` <= `stop` <= K; `self_key` may be outside it, and outside the keys.
    - `partial`: only with `lse`, and without `causal`.
    - `fpc`: M is even, and the rows of a pair have the same weight.
    - `group` with `groups` > 0, both or neither.
    - M = 0, and rows without visible keys.
    - `cache`: rows with the same cache differ only in `q`, `k`, `lse`, `real` and `score_biases`.

    A kernel may skip masks only if `triangular` is True.
    """

    q: Tensor
    """[B, H, M, D]"""
    k: Tensor
    """[B, G, K, D]"""
    scale: float
    lse: Tensor | None = None
    """[B, H, M]: log-sum-exp of the visible scores with the sink, if known; 0 for a row without
    visible keys. Complete rows are divided by their own sum, so a rounded value is enough."""
    real: Tensor | None = None
    """bool [B, K], as in `VisibleRanges`."""
    softcap: float | None = None
    sinks: Tensor | None = None
    key_bias: Tensor | None = None
    """As in `ScoreSpec`."""
    distance_bias: Tensor | None = None
    """As in `ScoreSpec`; distances start at `self_key`."""
    score_biases: tuple[ScoreBias, ...] = ()
    groups: int = 0
    """The number of classes of queries."""

    @property
    def triangular(self) -> bool:
        """Whether each row sees all keys up to its own token: causal, without gaps."""
        return self.causal and self.real is None

    def bounds(self) -> tuple[Tensor, Tensor, Tensor]:
        """`start`, `stop` and `self_key`; rows with the same cache share them."""
        if self.start is not None and self.stop is not None and self.self_key is not None:
            return self.start, self.stop, self.self_key
        assert self.causal
        B, _, M, _ = self.q.shape
        key = "bounds", B, M, self.diagonal_offset
        if key not in self.cache:
            self_key = torch.arange(M, dtype=torch.int32, device=self.q.device)
            self_key = (self_key + self.diagonal_offset).expand(B, -1).contiguous()
            self.cache[key] = torch.zeros_like(self_key), self_key + 1, self_key
        bounds: tuple[Tensor, Tensor, Tensor] = self.cache[key]
        return bounds

    def with_bounds(self) -> "KernelRows":
        """These rows with `start`, `stop` and `self_key`."""
        if self.start is not None:
            return self
        start, stop, self_key = self.bounds()
        return replace(self, start=start, stop=stop, self_key=self_key)

    def select_rows(self, sequence: int, m: slice) -> "KernelRows":
        """Some rows of one sequence."""
        start, stop, self_key = self.bounds()
        b = slice(sequence, sequence + 1)

        def of(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[b] if len(value) > 1 else value

        return KernelRows(
            q=self.q[b, :, m],
            k=self.k[b],
            scale=self.scale,
            start=start[b, m],
            stop=stop[b, m],
            self_key=self_key[b, m],
            real=of(self.real),
            softcap=self.softcap,
            sinks=self.sinks,
            key_bias=of(self.key_bias),
            distance_bias=self.distance_bias,
            score_biases=tuple(
                ScoreBias(
                    bias=each.bias[b] if len(each.bias) > 1 else each.bias,
                    queries=None if each.queries is None else each.queries[b, m],
                )
                for each in self.score_biases
            ),
        )


@dataclass(slots=True, eq=False, kw_only=True)
class AttentionSums:
    """Sums over rows, each row times its weight."""

    received: Tensor
    """float32 [B, H, K]: sum of A[i, j]."""
    received_later: Tensor
    """float32 [B, H, K]: the same over queries after the key, i > j."""
    mass: Tensor
    """float32 [B, H]: sum of `received` over the keys, for the conservation check."""
    entropy: Tensor
    """float32 [B, H]: sum over rows of -sum_j A ln A."""
    self_mass: Tensor
    """float32 [B, H]: sum of A[i, i]."""
    lse: Tensor | None = None
    """float32 or float64 [B, H, M]: the log-sum-exp that was used."""
    lse_error: Tensor | None = None
    """float32 [B, H]: largest error of the log-sum-exp in `KernelRows`; None if not compared."""
    score_bound: Tensor | None = None
    """float32 [B, H]: upper bound of the absolute scores; rounding errors grow with it."""
    unseen_mass: Tensor | None = None
    """float32 [B, H]: largest attention to a key that no row sees; above 0 only if a kernel is
    wrong. The caller computes it, not the kernel; None if every key is visible."""
    unseen_key: Tensor | None = None
    """int64 [B, H]: the key with this attention."""
    variance: Tensor | None = None
    """float32 [B, H, K]: variance of `received`, if rows are sampled."""
    entropy_variance: Tensor | None = None
    """float32 [B, H]"""
    flow: Tensor | None = None
    """float32 [B, H, groups, K]: `received` from each group of queries."""
    sink: Tensor | None = None
    """float64 [B, H]: attention on learned sinks. The caller computes it, from `lse`."""
    sink_position: Tensor | None = None
    """float64 [B, H]: the same, times the position of the query."""


def rows_of(
    spec: ScoreSpec,
    q: Tensor,
    k: Tensor,
    block: RowBlock,
    lse: Tensor | None = None,
    groups: int = 0,
    repeats: int = 1,
) -> KernelRows:
    """The kernel input for a block of rows of a call, whose batch is stacked `repeats` times."""

    def of(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach()

    real = spec.visible.real
    if real is not None and repeats > 1:
        real = real.repeat(repeats, 1)
    shared: dict[str, Any] = {name: getattr(block, name) for name in RowBlock.__slots__}
    return KernelRows(
        **shared,
        q=block.take(q.detach(), 2),
        k=k.detach(),
        scale=spec.scale,
        lse=None if lse is None else block.take(lse.detach(), 2),
        real=real,
        softcap=spec.softcap,
        sinks=of(spec.sinks),
        key_bias=of(spec.key_bias),
        distance_bias=of(spec.distance_bias),
        score_biases=tuple(
            each if each.queries is None else replace(each, queries=block.take(each.queries, 1))
            for each in spec.score_biases
        ),
        groups=groups if block.group is not None else 0,
    )


def distance_index(self_key: Tensor, left: int, right: int, size: int) -> Tensor:
    """int64 [..., keys]: index into a `distance_bias` of this size, from `self_key` [...] to the
    keys `left … right`."""
    keys = torch.arange(left, right, device=self_key.device)
    return (self_key[..., None].long() - keys + size // 2).clamp_(0, size - 1)


def total_score_bias(
    score_biases: tuple[ScoreBias, ...], sequences: slice, heads: slice, rows: slice, keys: slice
) -> Tensor | None:
    """float32, broadcast to [sequences, heads, rows, keys]: the sum of all score biases."""
    total = None
    for added_bias in score_biases:
        some = sequences if len(added_bias.bias) > 1 else slice(None)
        bias = added_bias.bias[
            some, heads if added_bias.bias.shape[1] > 1 else slice(None), None, keys
        ]
        if added_bias.queries is not None:
            bias = torch.where(added_bias.queries[sequences, None, rows, None], bias, 0.0)
        total = bias if total is None else total + bias
    return total


def score_bounds(rows: KernelRows) -> Tensor:
    """float32 [B, G]: upper bound of the absolute scores, before the soft-cap.

    Not finite if a query or key is not.
    """
    B, G = rows.k.shape[:2]
    if rows.q.shape[2] == 0:
        return torch.zeros(B, G, device=rows.k.device)
    q, k = (torch.linalg.vector_norm(t, dim=-1).float() for t in (rows.q, rows.k))
    score_bound: Tensor = q.reshape(B, G, -1).amax(-1) * k.amax(-1) * abs(rows.scale)
    if rows.key_bias is not None:
        most = rows.key_bias.float().abs().amax(-1)
        score_bound = score_bound + most.reshape(len(most), G, -1).amax(-1)
    if rows.distance_bias is not None:
        score_bound = score_bound + rows.distance_bias.float().abs().amax(-1).view(G, -1).amax(-1)
    for added_bias in rows.score_biases:  # hidden keys have no score
        score_bound = (
            score_bound + added_bias.bias.abs().where(added_bias.bias > -torch.inf, 0.0).amax()
        )
    return score_bound


@cache
def has_triton() -> bool:
    """Whether the Triton kernels can be imported."""
    return find_spec("triton") is not None
