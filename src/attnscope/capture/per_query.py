"""What a scope tells of single queries, from what `watch(…, keep=True)` kept of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nan

from attnscope.capture.conservation import check
from attnscope.capture.stored_rows import binned, bins_of, row_of, tell
from attnscope.capture.sums import LayerAccumulator
from attnscope.errors import InputError, ScopeError, describe, unknown
from attnscope.kernels import AttentionSums, PerQueryRequest, PerQueryResult
from attnscope.kernels.one_row import renyi2
from attnscope.measures.layer import PerQuery


class TopK(NamedTuple):
    """The keys that queries look at most, largest first."""

    key: Tensor
    """int64 [B, H, Q, k]; -1 where fewer are visible."""
    weight: Tensor
    """[B, H, Q, k]"""
    score: Tensor
    """[B, H, Q, k]: as the softmax took it (scaled, soft-capped, biased); nan where only weights
    are known."""


class PerQueryMixin:
    """The part of a `Scope` that goes query by query. Shapes: Q counted queries."""

    backend: str
    _cross: bool

    def _read(self, layer: int) -> tuple[LayerAccumulator, AttentionSums, Tensor]:
        raise NotImplementedError

    def _seen(self, layer: int) -> LayerAccumulator:
        raise NotImplementedError

    def _shares(self, layer: int, class_ids: Any, n: int) -> Tensor:
        raise NotImplementedError

    def query_positions(self, layer: int, bin: int | None = None) -> Tensor:
        """int64 [B, Q]: where the counted queries stand, in the order of `rows`; -1 where a shorter
        sequence has none. With `bin`, the first position of each bin of so many."""
        where = self._kept(layer)
        return where if bin is None else bins_of(where, bin)

    def rows(self, layer: int, class_ids: Any, n: int, bin: int | None = None) -> Tensor:
        """[B, H, Q, n]: the attention of every counted query to each class; `mass` is their mean.

        Needs `watch(…, keep=True)`. The classes are given as in `mass`; `query_positions` says
        which queries these are, and nan stands where it says -1. With `bin`, means over the
        queries of every so many positions.
        """
        mass = self._told(layer, PerQueryRequest(shares=self._shares(layer, class_ids, n))).mass
        assert mass is not None
        return self._binned(layer, mass, bin)

    def row(self, layer: int, query: int, sequence: int = 0) -> Tensor:
        """[H, K]: all that one counted query looks at, by its position in the sequence; 0 on keys
        that it does not see. Needs `watch(…, keep=True)`."""
        where = self._kept(layer)
        if not 0 <= sequence < len(where):
            raise unknown("sequence", sequence, range(len(where)))
        totals = self._seen(layer)
        found = row_of(totals.kept, query, sequence, totals.keys)
        if found is None:
            raise InputError(
                f"the query at position {query} of sequence {sequence} was not counted; "
                f"query_positions({layer}) lists the counted ones",
                code="query-not-counted",
                query=query,
                sequence=sequence,
            )
        return found

    def weight(self, layer: int, key_of: Any, bin: int | None = None) -> Tensor:
        """[B, H, Q]: the attention of every counted query to a key of its own.

        `key_of` is int [B, Q], the position of a key for each of `query_positions`, negative for
        none, where the weight is nan: `query_positions(layer) - 1` is the token before it.
        """
        where = self._kept(layer)
        keys = torch.as_tensor(key_of)
        most = self._seen(layer).keys
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
        weight = self._told(layer, PerQueryRequest(keys=keys)).weight
        assert weight is not None
        return self._binned(layer, weight.where(keys[:, None] >= 0, torch.nan), bin)

    def by_distance(
        self, layer: int, first: int = 4, recent: int = 64, bin: int | None = None
    ) -> Tensor:
        """[B, H, Q, 3]: the attention of every counted query to the `first` tokens of the text, to
        the `recent` ones up to itself (less those), and to the rest."""
        for name, value in {"first": first, "recent": recent}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(
                    f"{name}={value!r} must be a whole number from 0: a number of tokens",
                    code="bad-number",
                    argument=name,
                    value=value,
                )
        where = self._kept(layer)
        if self._cross:
            raise ScopeError(
                "in cross-attention queries and keys belong to two texts, so they have no distance",
                code="cross-attention",
                measure="by_distance",
            )
        totals = self._seen(layer)
        begin = totals.first.to(where.device)[:, None].expand_as(where)
        near = torch.maximum(where - recent + 1, begin + first)
        spans = [(begin, begin + first), (near, where + 1), (where * 0, where * 0 + totals.keys)]
        asked = PerQueryRequest(spans=torch.stack([torch.stack(span, -1) for span in spans], 2))
        told = self._told(layer, asked).spans
        assert told is not None
        sink, close, everything = told.unbind(-1)
        rest = (everything - sink - close).clamp(min=0)
        return self._binned(layer, torch.stack([sink, close, rest], -1), bin)

    def query_entropy(self, layer: int, order: int = 1, bin: int | None = None) -> Tensor:
        """[B, H, Q]: the entropy of every counted query in nats: Shannon's, -sum_j A ln A, or of
        order 2 Rényi's, -ln sum_j A²."""
        if isinstance(order, bool) or order not in (1, 2):
            raise unknown("order", order, ("1 (Shannon)", "2 (Rényi)"))
        told = self._told(layer, PerQueryRequest(entropies=True))
        assert told.entropy is not None
        assert told.squares is not None
        return self._binned(layer, told.entropy if order == 1 else renyi2(told.squares), bin)

    def largest(self, layer: int, k: int = 1) -> TopK:
        """The `k` keys each counted query looks at most, their weights and their scores."""
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise InputError(
                f"k={k!r} must be a whole number from 1: a number of keys",
                code="bad-number",
                argument="k",
                value=k,
            )
        told = self._told(layer, PerQueryRequest(top=k))
        assert told.top_key is not None
        assert told.top_weight is not None
        assert told.top_score is not None
        return TopK(told.top_key, told.top_weight, told.top_score)

    def single(self, layer: int, heads: Sequence[int] | None = None) -> PerQuery:
        """All of this, as measures read it; of some heads, or of all."""

        def read(name: str, *asked: Any) -> Any:
            told = getattr(self, name)(layer, *asked)
            if heads is None:
                return told
            picked = list(heads)
            return told[:, picked] if isinstance(told, Tensor) else [t[:, picked] for t in told]

        return PerQuery(positions=self.query_positions(layer), read=read)

    def _kept(self, layer: int) -> Tensor:
        """Positions of the queries whose rows can be told."""
        totals = self._seen(layer)
        if not totals.kept:
            self._read(layer)  # says so where no query counted
            raise ScopeError(
                "per-query results need stored queries and keys: watch(model, keep=True)",
                code="queries-not-kept",
            )
        return torch.cat([kept.positions for kept in totals.kept], 1).to(totals.device)

    def _told(self, layer: int, asked: PerQueryRequest) -> PerQueryResult:
        self._kept(layer)
        kept = self._seen(layer).kept
        told = tell(kept, asked, self.backend)
        if told.drift is not None:
            off = told.drift.nan_to_num(0.0).amax(2)[None]
            dtype = torch.float32 if kept[0].rows is None else kept[0].rows.q.dtype
            check([layer], off, off * 0, dtype, "rows add up to 1 only within")
        return told

    def _binned(self, layer: int, values: Tensor, bin: int | None) -> Tensor:
        return values if bin is None else binned(values, self._kept(layer), bin)

    def top_keys(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The keys each query looks at most, as asked for with `watch(…, top=k)`.

        Positions of the queries [B, M] (-1 where a shorter sequence has fewer), their keys
        [B, H, M, k] (-1 where fewer are visible) and the weights [B, H, M, k], largest first; nan
        where there is no query.
        """
        totals, _, _ = self._read(layer)
        if not totals.top:
            kept = bool(totals.kept)
            raise ScopeError(
                "top_keys reads what watch(model, top=5) keeps, and top was not given; "
                + (f"read largest({layer}, k=5) from what keep=True kept" if kept else "give it"),
                code="top-keys-not-kept",
                instead="largest" if kept else "top",
            )
        queries, keys, weights = zip(*totals.top, strict=True)
        width = max(part.shape[-1] for part in keys)
        wide = [torch.nn.functional.pad(k, (0, width - k.shape[-1]), value=-1) for k in keys]
        heavy = [torch.nn.functional.pad(w, (0, width - w.shape[-1])) for w in weights]
        where = torch.cat(queries, 1)
        there = (where >= 0)[:, None, :, None]
        return where, torch.cat(wide, 2).where(there, -1), torch.cat(heavy, 2).where(there, nan)
