"""The input and output of the kernels: rows of an attention call, and the sums over them."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnscope.kernels.call import ScoreBias, ScoreSpec


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
    max_logit: bool = False
    """Whether to compute the largest score."""

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
    max_logit: Tensor | None = None
    """float32 [B, H]: largest score of a key that a row sees, whatever the row's weight; -inf if no
    row sees a key. None unless `KernelRows.max_logit`."""
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
    *,
    max_logit: bool = False,
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
        max_logit=max_logit,
    )


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
