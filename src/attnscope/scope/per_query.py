"""The per-query results of a scope, computed from rows that `watch(…, keep=True)` stored."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscope.errors import (
    InputError,
    ScopeError,
    check_int,
    is_int,
    out_of_range,
    unknown,
    wrong_shape,
)
from attnscope.kernels import PerQueryRequest, PerQueryResult
from attnscope.kernels.one_row import renyi2
from attnscope.measures.layer import PerQuery
from attnscope.scope.class_shares import class_shares
from attnscope.scope.conservation import check
from attnscope.scope.stored_rows import (
    attention_matrix,
    attention_row,
    binned,
    bins_of,
    reduce_per_query,
)
from attnscope.scope.text_sums import TextSums

MATRIX_KEYS = 4_096
"""Largest number of keys of `Scope.matrix`: 64 MiB."""


class TopK(NamedTuple):
    """The keys with the largest weights of each query, largest first."""

    key: Tensor
    """int64 [B, H, Q, k]; -1 where fewer are visible."""
    weight: Tensor
    """[B, H, Q, k]"""
    score: Tensor
    """[B, H, Q, k]: the input of the softmax (scaled, soft-capped, biased); nan if only weights are
    known."""


class PerQuerySums(TextSums):
    """The per-query methods of a `Scope`. Shapes: Q counted queries."""

    def query_positions(self, layer: int, bin: int | None = None) -> Tensor:
        """int64 [B, Q]: positions of the counted queries, in the order of `rows`; -1 if a shorter
        sequence has fewer. With `bin`, the first position of each bin of that many positions."""
        where = self._stored_positions(layer)
        return where if bin is None else bins_of(where, bin)

    def rows(self, layer: int, classes: Any, n: Any = None, bin: int | None = None) -> Tensor:
        """[B, H, Q, n]: the attention of every counted query to each class; `mass` is their mean.

        Needs `watch(…, keep=True)`. The classes are given as in `mass`. `query_positions` has the
        positions of the queries; the result is nan where it is -1. With `bin`, means over the
        queries of each bin of that many positions.
        """
        mass = self._per_query(layer, PerQueryRequest(shares=self._shares(layer, classes, n))).mass
        assert mass is not None
        return self._binned(layer, mass, bin)

    def row(self, layer: int, query: int, sequence: int = 0) -> Tensor:
        """[H, K]: the attention row of one counted query, given by its position; 0 on keys that it
        does not see. Needs `watch(…, keep=True)`."""
        where = self._stored_positions(layer)
        if not 0 <= sequence < len(where):
            raise unknown("sequence", sequence, range(len(where)))
        row = attention_row(self._stored_rows(layer), query, sequence, self._extents[layer][1])
        if row is None:
            raise InputError(
                f"the query at position {query} of sequence {sequence} was not counted; "
                f"query_positions({layer}) lists the counted ones",
                code="query-not-counted",
                query=query,
                sequence=sequence,
            )
        return row

    def matrix(self, layer: int, head: int, sequence: int = 0) -> Tensor:
        """[Q, K]: the attention matrix of one head of a short text, at most 4,096 keys.

        It has a row for each counted query (with queries="all", for each token) and a column for
        each key; it is 0 on keys that a query does not see. Needs `watch(…, keep=True)`.
        """
        return self._matrices(layer, sequence, MATRIX_KEYS, head)[0]

    def _matrices(
        self, layer: int, sequence: int, max_keys: int, head: int | None = None
    ) -> Tensor:
        """[H or 1, Q, K]: the attention matrices of all heads, or of one."""
        where, keys = self._stored_positions(layer), self._extents[layer][1]
        if not is_int(sequence) or sequence >= len(where):
            raise unknown("sequence", sequence, range(len(where)))
        if keys > max_keys:
            raise ScopeError(
                f"the text has {keys:,} keys, and a matrix may have {max_keys:,}; rows(…), "
                "by_distance(…) and largest(…) give parts of it for texts of any length",
                code="matrix-too-large",
                keys=keys,
                most=max_keys,
            )
        return attention_matrix(self._stored_rows(layer), sequence, keys, head)

    def weight(self, layer: int, key_of: Any, bin: int | None = None) -> Tensor:
        """[B, H, Q]: the attention of every counted query to one key each.

        `key_of` is int [B, Q], the position of a key for each of `query_positions`. The weight is
        nan where it is negative. Example: `query_positions(layer) - 1`, the previous token.
        """
        where = self._stored_positions(layer)
        keys = torch.as_tensor(key_of)
        most = self._extents[layer][1]
        if keys.shape != where.shape or keys.is_floating_point() or keys.dtype == torch.bool:
            expected = (
                f"an int tensor {list(where.shape)}, a key for each of query_positions, or -1"
            )
            raise wrong_shape("key_of", expected, keys)
        if keys.numel() and int(keys.max()) >= most:
            extremes = int(keys.min()), int(keys.max())
            raise out_of_range("key_of", f"below {most}, the number of keys", *extremes)
        keys = keys.long().to(where.device)
        weight = self._per_query(layer, PerQueryRequest(keys=keys)).weight
        assert weight is not None
        return self._binned(layer, weight.where(keys[:, None] >= 0, torch.nan), bin)

    def by_distance(
        self, layer: int, first: int = 4, recent: int = 64, bin: int | None = None
    ) -> Tensor:
        """[B, H, Q, 3]: the attention of every counted query to the `first` tokens of the text, to
        the `recent` tokens up to itself (without the first ones), and to the rest."""
        check_int("first", first, "a number of tokens")
        check_int("recent", recent, "a number of tokens")
        where = self._stored_positions(layer)
        if self._cross:
            raise ScopeError(
                "in cross-attention queries and keys belong to two texts, so they have no distance",
                code="cross-attention",
                measure="by_distance",
            )
        begin = self._first_token.to(where.device)[:, None].expand_as(where)
        near = torch.maximum(where - recent + 1, begin + first)
        spans = [
            (begin, begin + first),
            (near, where + 1),
            (where * 0, where * 0 + self._extents[layer][1]),
        ]
        request = PerQueryRequest(spans=torch.stack([torch.stack(span, -1) for span in spans], 2))
        result = self._per_query(layer, request).spans
        assert result is not None
        sink, close, everything = result.unbind(-1)
        rest = (everything - sink - close).clamp(min=0)
        return self._binned(layer, torch.stack([sink, close, rest], -1), bin)

    def query_entropy(self, layer: int, order: int = 1, bin: int | None = None) -> Tensor:
        """[B, H, Q]: the entropy of every counted query in nats: Shannon's, -sum_j A ln A, or of
        order 2 Rényi's, -ln sum_j A²."""
        if isinstance(order, bool) or order not in (1, 2):
            raise unknown("order", order, ("1 (Shannon)", "2 (Rényi)"))
        result = self._per_query(layer, PerQueryRequest(entropies=True))
        assert result.entropy is not None
        assert result.squares is not None
        return self._binned(layer, result.entropy if order == 1 else renyi2(result.squares), bin)

    def largest(self, layer: int, k: int = 1) -> TopK:
        """The `k` keys with the largest weights of each counted query, with weights and scores."""
        check_int("k", k, "a number of keys", 1)
        result = self._per_query(layer, PerQueryRequest(top=k))
        assert result.top_key is not None
        assert result.top_weight is not None
        assert result.top_score is not None
        return TopK(result.top_key, result.top_weight, result.top_score)

    def single(self, layer: int, heads: Sequence[int] | None = None) -> PerQuery:
        """The per-query results for measures, for some heads or all."""
        positions = self.query_positions(layer)
        return PerQuery(scope=self, layer=layer, positions=positions, heads=heads)

    def _stored_positions(self, layer: int) -> Tensor:
        """Positions of the stored queries; an error without `keep=True`."""
        self._ensure_captured(layer)
        self._flush_pending()
        stored = self._stored_rows(layer)
        if not stored:
            self._read(layer)  # raises if no query counted
            raise ScopeError(
                "per-query results need stored queries and keys: watch(model, keep=True)",
                code="queries-not-kept",
            )
        return torch.cat([rows.positions for rows in stored], 1)

    def _per_query(self, layer: int, request: PerQueryRequest) -> PerQueryResult:
        self._stored_positions(layer)
        stored = self._stored_rows(layer)
        result = reduce_per_query(stored, request, self.backend)
        if result.lse_error is not None:
            off = result.lse_error.nan_to_num(0.0).amax(2)[None]
            dtype = torch.float32 if stored[0].rows is None else stored[0].rows.q.dtype
            check([layer], off, off * 0, dtype, "rows add up to 1 only within")
        return result

    def _binned(self, layer: int, values: Tensor, bin: int | None) -> Tensor:
        return values if bin is None else binned(values, self._stored_positions(layer), bin)

    def _shares(self, layer: int, classes: Any, n: Any) -> Tensor:
        """[B, K, n]: classes as shares, checked, on the device of the layer."""
        self._ensure_captured(layer)
        self._flush_pending()
        rows = self._stored_rows(layer)
        device = rows[0].positions.device if rows else self._read(layer).computed().received.device
        return class_shares(self, self._extents[layer][1], classes, n).to(device)
