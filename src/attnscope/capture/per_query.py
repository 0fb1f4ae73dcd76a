"""The per-query results of a scope, computed from rows that `watch(…, keep=True)` stored."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nan

from attnscope.capture.conservation import check
from attnscope.capture.stored_rows import attention_row, binned, bins_of, reduce_per_query
from attnscope.capture.sums import LayerAccumulator
from attnscope.errors import InputError, ScopeError, describe, unknown
from attnscope.kernels import AttentionSums, PerQueryRequest, PerQueryResult
from attnscope.kernels.one_row import renyi2
from attnscope.measures.layer import PerQuery


class TopK(NamedTuple):
    """The keys with the largest weights of each query, largest first."""

    key: Tensor
    """int64 [B, H, Q, k]; -1 where fewer are visible."""
    weight: Tensor
    """[B, H, Q, k]"""
    score: Tensor
    """[B, H, Q, k]: the input of the softmax (scaled, soft-capped, biased); nan if only weights are
    known."""


class PerQueryMixin:
    """The per-query methods of a `Scope`. Shapes: Q counted queries."""

    backend: str
    _cross: bool

    def _read(self, layer: int) -> tuple[LayerAccumulator, AttentionSums, Tensor]:
        raise NotImplementedError

    def _layer_totals(self, layer: int) -> LayerAccumulator:
        raise NotImplementedError

    def _shares(self, layer: int, class_ids: Any, n: int) -> Tensor:
        raise NotImplementedError

    def query_positions(self, layer: int, bin: int | None = None) -> Tensor:
        """int64 [B, Q]: positions of the counted queries, in the order of `rows`; -1 if a shorter
        sequence has fewer. With `bin`, the first position of each bin of that many positions."""
        where = self._stored_positions(layer)
        return where if bin is None else bins_of(where, bin)

    def rows(self, layer: int, class_ids: Any, n: int, bin: int | None = None) -> Tensor:
        """[B, H, Q, n]: the attention of every counted query to each class; `mass` is their mean.

        Needs `watch(…, keep=True)`. The classes are given as in `mass`. `query_positions` has the
        positions of the queries; the result is nan where it is -1. With `bin`, means over the
        queries of each bin of that many positions.
        """
        mass = self._per_query(
            layer, PerQueryRequest(shares=self._shares(layer, class_ids, n))
        ).mass
        assert mass is not None
        return self._binned(layer, mass, bin)

    def row(self, layer: int, query: int, sequence: int = 0) -> Tensor:
        """[H, K]: the attention row of one counted query, given by its position; 0 on keys that it
        does not see. Needs `watch(…, keep=True)`."""
        where = self._stored_positions(layer)
        if not 0 <= sequence < len(where):
            raise unknown("sequence", sequence, range(len(where)))
        totals = self._layer_totals(layer)
        row = attention_row(totals.stored, query, sequence, totals.keys)
        if row is None:
            raise InputError(
                f"the query at position {query} of sequence {sequence} was not counted; "
                f"query_positions({layer}) lists the counted ones",
                code="query-not-counted",
                query=query,
                sequence=sequence,
            )
        return row

    def weight(self, layer: int, key_of: Any, bin: int | None = None) -> Tensor:
        """[B, H, Q]: the attention of every counted query to one key each.

        `key_of` is int [B, Q], the position of a key for each of `query_positions`. The weight is
        nan where it is negative. Example: `query_positions(layer) - 1`, the previous token.
        """
        where = self._stored_positions(layer)
        keys = torch.as_tensor(key_of)
        most = self._layer_totals(layer).keys
        if keys.shape != where.shape or keys.is_floating_point() or keys.dtype == torch.bool:
            raise InputError(
                f"key_of must be an int tensor {list(where.shape)}, a key for each of "
                f"query_positions({layer}), -1 for none; got {describe(keys)}",
                code="wrong-shape",
                argument="key_of",
                got=describe(keys),
            )
        if keys.numel() and int(keys.max()) >= most:
            raise InputError(
                f"key_of must lie below {most}, the number of keys; got {int(keys.max())}",
                code="out-of-range",
                argument="key_of",
                value=int(keys.max()),
            )
        keys = keys.long().to(where.device)
        weight = self._per_query(layer, PerQueryRequest(keys=keys)).weight
        assert weight is not None
        return self._binned(layer, weight.where(keys[:, None] >= 0, torch.nan), bin)

    def by_distance(
        self, layer: int, first: int = 4, recent: int = 64, bin: int | None = None
    ) -> Tensor:
        """[B, H, Q, 3]: the attention of every counted query to the `first` tokens of the text, to
        the `recent` tokens up to itself (without the first ones), and to the rest."""
        for name, value in {"first": first, "recent": recent}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(
                    f"{name}={value!r} must be a whole number from 0: a number of tokens",
                    code="bad-number",
                    argument=name,
                    value=value,
                )
        where = self._stored_positions(layer)
        if self._cross:
            raise ScopeError(
                "in cross-attention queries and keys belong to two texts, so they have no distance",
                code="cross-attention",
                measure="by_distance",
            )
        totals = self._layer_totals(layer)
        begin = totals.first_token.to(where.device)[:, None].expand_as(where)
        near = torch.maximum(where - recent + 1, begin + first)
        spans = [(begin, begin + first), (near, where + 1), (where * 0, where * 0 + totals.keys)]
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
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise InputError(
                f"k={k!r} must be a whole number from 1: a number of keys",
                code="bad-number",
                argument="k",
                value=k,
            )
        result = self._per_query(layer, PerQueryRequest(top=k))
        assert result.top_key is not None
        assert result.top_weight is not None
        assert result.top_score is not None
        return TopK(result.top_key, result.top_weight, result.top_score)

    def single(self, layer: int, heads: Sequence[int] | None = None) -> PerQuery:
        """The per-query results for measures, for some heads or all."""

        def read(name: str, *request: Any) -> Any:
            result = getattr(self, name)(layer, *request)
            if heads is None:
                return result
            picked = list(heads)
            return (
                result[:, picked] if isinstance(result, Tensor) else [t[:, picked] for t in result]
            )

        return PerQuery(positions=self.query_positions(layer), read=read)

    def _stored_positions(self, layer: int) -> Tensor:
        """Positions of the stored queries; an error without `keep=True`."""
        totals = self._layer_totals(layer)
        if not totals.stored:
            self._read(layer)  # raises if no query counted
            raise ScopeError(
                "per-query results need stored queries and keys: watch(model, keep=True)",
                code="queries-not-kept",
            )
        return torch.cat([stored.positions for stored in totals.stored], 1).to(totals.device)

    def _per_query(self, layer: int, request: PerQueryRequest) -> PerQueryResult:
        self._stored_positions(layer)
        stored = self._layer_totals(layer).stored
        result = reduce_per_query(stored, request, self.backend)
        if result.lse_error is not None:
            off = result.lse_error.nan_to_num(0.0).amax(2)[None]
            dtype = torch.float32 if stored[0].rows is None else stored[0].rows.q.dtype
            check([layer], off, off * 0, dtype, "rows add up to 1 only within")
        return result

    def _binned(self, layer: int, values: Tensor, bin: int | None) -> Tensor:
        return values if bin is None else binned(values, self._stored_positions(layer), bin)

    def top_keys(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The keys with the largest weights of each query, stored by `watch(…, top=k)`.

        Returns the positions of the queries [B, M] (-1 if a shorter sequence has fewer), their keys
        [B, H, M, k] (-1 if fewer are visible) and the weights [B, H, M, k], largest first (nan
        where there is no query).
        """
        totals, _, _ = self._read(layer)
        if not totals.top:
            stored = bool(totals.stored)
            raise ScopeError(
                "top_keys reads what watch(model, top=5) keeps, and top was not given; "
                + (f"read largest({layer}, k=5) from what keep=True kept" if stored else "give it"),
                code="top-keys-not-kept",
                instead="largest" if stored else "top",
            )
        queries, keys, weights = zip(*totals.top, strict=True)
        width = max(part.shape[-1] for part in keys)
        padded_keys = [torch.nn.functional.pad(k, (0, width - k.shape[-1]), value=-1) for k in keys]
        padded_weights = [torch.nn.functional.pad(w, (0, width - w.shape[-1])) for w in weights]
        where = torch.cat(queries, 1)
        counted = (where >= 0)[:, None, :, None]
        return (
            where,
            torch.cat(padded_keys, 2).where(counted, -1),
            torch.cat(padded_weights, 2).where(counted, nan),
        )
