"""Reduces the counted rows of attention calls with a kernel, and adds them to scopes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnscope import kernels
from attnscope.capture import dense_fallback
from attnscope.capture.conservation import compare_unseen
from attnscope.capture.generation import CompletionSpan
from attnscope.capture.geometry import Geometry, QuerySelection
from attnscope.capture.kernel_rows import positions, rows_of
from attnscope.capture.pending import (
    PassQueue,
    SiteQueue,
    cat_in_memory_order,
    free_memory,
    is_large,
)
from attnscope.capture.query_selection import select
from attnscope.capture.sampling import exact_lse, spot_check
from attnscope.capture.scope import Scope
from attnscope.capture.stored_rows import store_rows, store_weights
from attnscope.capture.sums import LayerAccumulator, split, unstack
from attnscope.errors import ConservationError, ModelError, ScopeError
from attnscope.kernels import AttentionCall, AttentionSums

# The share of free memory that stored queries and keys may use.
MAX_KEPT_SHARE = 0.5


class Reducer:
    """Adds attention calls to the sums of scopes, and stores rows if `keep` is set."""

    def __init__(
        self,
        parts: dict[str, Scope],
        backend: str,
        device: torch.device,
        *,
        layers: int,
        top: int,
        keep: bool,
    ):
        self.parts = parts
        """The scope of each part: a stack, or "cross"."""
        self.backend = backend
        self.device = device
        self.layers = layers
        """The number of measured layers of all parts."""
        self.top = top
        self.keep = keep
        self.keep_budget: int | None = None
        self.cache_overwrites = True
        """Whether the cache may overwrite the keys of the current pass."""
        self.dtype = torch.float32
        """The dtype of the queries measured last."""

    def kernel_for(self, q: Tensor) -> str:
        """The kernel for these queries; a layer may be on another device than the model."""
        elsewhere = self.backend == "triton" and q.device.type != self.device.type
        return "streaming" if elsewhere else self.backend

    def reads_in_place(self, q: Tensor) -> bool:
        """Whether the kernel reduces several layers without stacking a copy."""
        return self.kernel_for(q) == "triton" and q.element_size() == 2

    def select(
        self, scope: Scope, geometry: Geometry, span: CompletionSpan
    ) -> QuerySelection | None:
        """The counted rows of a call."""
        key = scope._queries, span
        if key not in geometry.selections:
            geometry.selections[key] = select(
                scope._queries, geometry, span, scope._classes, scope._groups
            )
        return geometry.selections[key]

    def _accumulator(
        self,
        scope: Scope,
        totals: LayerAccumulator,
        geometry: Geometry,
        span: CompletionSpan,
        selection: QuerySelection | None,
    ) -> LayerAccumulator:
        """The sums to which the counted rows are added: the provisional ones, or the final ones."""
        if selection is None or not scope._queries.provisional(geometry, span):
            return totals
        if totals.provisional is None:
            totals.provisional = LayerAccumulator(first_token=totals.first_token)
            return totals.provisional
        again = selection.count > 0
        if bool(again.all()):
            totals.provisional = LayerAccumulator(first_token=totals.first_token)
        else:
            totals.provisional.zero_sequences(again)
        return totals.provisional

    def reduce_weights(
        self,
        scope: Scope,
        A: Tensor,
        geometry: Geometry,
        totals: LayerAccumulator,
        span: CompletionSpan,
        *,
        sinks: bool,
    ) -> None:
        """Fallback: reduce the weight matrix of a layer before the next layer runs."""
        self.dtype = A.dtype
        scope.backend = "eager-fallback"
        selection = self.select(scope, geometry, span)
        sums = self._accumulator(scope, totals, geometry, span, selection)
        if selection is not None:
            A = dense_fallback.reduce(
                A, geometry, selection, sums, scope._groups, self.top, has_sinks=sinks
            )
            if self.keep:
                kept, more = store_weights(A, positions(selection).to(A.device))
                sums.stored.append(kept)
                self._check_budget(sums, more)

    def reduce(
        self, queues: list[SiteQueue], geometry: Geometry, q: Tensor, k: Tensor, lse: Tensor | None
    ) -> None:
        """Reduce the rows of L queues of one group, stacked as [L · B, …]."""
        first = queues[0]
        scope = self.parts[first.site.part]
        targets = []
        selection = self.select(scope, geometry, first.span)
        for queue in queues:
            totals = scope._layers[queue.site.layer]
            totals.position = max(totals.position, geometry.first_query + geometry.queries)
            totals.keys = max(totals.keys, geometry.first_key + geometry.keys)
            targets.append(self._accumulator(scope, totals, geometry, queue.span, selection))
        if selection is None:
            return
        self.dtype = q.dtype
        backend = self.kernel_for(q)
        call = replace(first.call, q=q, k=k, v=k[:, :, :0])
        if len(first.geometries) > 1:
            call = replace(call, visible=geometry.visible)
        for totals in targets:
            totals.selections.append(selection)
            totals.sampled |= selection.sampled
        if self.keep:
            self._keep(targets, selection, call, lse if backend == "triton" else None)
        if self._may_defer(queues, selection, geometry):
            self._defer(scope, queues, targets[0], (call, geometry, selection, lse, backend))
            return
        self._add(queues, targets, call, geometry, selection, lse, backend)

    def reduce_stacked(
        self, scope: Scope, pass_queue: PassQueue, selection: QuerySelection
    ) -> AttentionSums:
        """The sums of all layers of a queued pass, stacked as [L · B, …]."""
        all_rows, leader = selection.all_rows, pass_queue.leader
        q, k, lse = pass_queue.tensors()
        backend = self.kernel_for(q[0])
        layers = kernels.layers_kernel(backend)
        if layers is not None and (all_rows.index is None or all_rows.single_row is not None):
            call = replace(leader.call, q=q[0], k=k[0])
            rows = rows_of(call, all_rows, lse[0], scope._groups)
            sums = layers(rows, q, k, lse, all_rows.single_row or 0)
            if sums is not None:
                return compare_unseen(rows, sums)
        L = len(q)
        call = replace(leader.call, q=cat_in_memory_order(q), k=cat_in_memory_order(k))
        rows = rows_of(call, all_rows.repeat(L), torch.cat(lse), scope._groups, L)
        return compare_unseen(rows, kernels.kernel(backend)(rows))

    def _may_defer(
        self, queues: list[SiteQueue], selection: QuerySelection, geometry: Geometry
    ) -> bool:
        """Whether column sums are computed on first read.

        With keep=True and a cache that does not overwrite keys, the tensors of long texts are
        stored anyway. Then a reader of rows alone does not need the sums.
        """
        scope = self.parts[queues[0].site.part]
        return (
            self.keep
            and not (self.cache_overwrites or self.top or scope._groups or selection.sampled)
            and len(queues) == 1
            and geometry.first_query == 0
            and not scope._queries.provisional(geometry, queues[0].span)
            and is_large(queues[0].call)
        )

    def _defer(
        self, scope: Scope, queues: list[SiteQueue], totals: LayerAccumulator, what: Any
    ) -> None:
        layer, dtype = queues[0].site.layer, self.dtype
        without_values = [replace(queues[0], call=what[0])]  # without the values

        def deferred() -> None:
            self._add(without_values, [totals], *what)
            try:
                scope._check_conservation(dtype, layer)
            except (ConservationError, ModelError):
                del scope._layers[layer]
                raise

        totals.deferred = deferred

    def _add(
        self,
        queues: list[SiteQueue],
        targets: list[LayerAccumulator],
        call: AttentionCall,
        geometry: Geometry,
        selection: QuerySelection,
        lse: Tensor | None,
        backend: str,
    ) -> None:
        """Reduce the rows of a selection, and add them to the sums of each queue."""
        L, reduce = len(queues), kernels.kernel(backend)
        groups = self.parts[queues[0].site.part]._groups
        if selection.sampled:  # every block needs the log-sum-exp of whole rows
            lse, drift = exact_lse(call, geometry, lse, backend, L)
            spot_check(queues, call, geometry, lse, backend)
            for totals, queue_drift in zip(targets, unstack(drift, L), strict=True):
                totals.update_bounds(queue_drift)
        for block in selection.blocks:
            rows = rows_of(call, block.repeat(L), lse, groups, L)
            sums = compare_unseen(rows, reduce(rows))
            for totals, sums_of_queue in zip(targets, split(sums, L), strict=True):
                totals.add(sums_of_queue, geometry.first_key)
        if call.sinks is None and not self.top:
            return
        rows = rows_of(call, selection.all_rows.repeat(L), lse, 0, L)
        if call.sinks is not None:
            known = rows.lse if selection.sampled else sums.lse
            assert known is not None
            for queue, totals, queue_lse in zip(queues, targets, unstack(known, L), strict=True):
                assert queue.call.sinks is not None
                sink_weights = torch.exp(queue.call.sinks.detach().double()[:, None] - queue_lse)
                totals.add_sink(sink_weights, selection)
        if self.top:
            result = kernels.per_query_kernel(backend)(rows, kernels.PerQueryRequest(top=self.top))
            keys, weights = result.top_key, result.top_weight
            assert keys is not None
            assert weights is not None
            where = positions(selection).to(keys.device)
            keys = keys.where(keys < 0, keys + geometry.first_key)
            top = zip(unstack(keys, L), unstack(weights, L), strict=True)
            for totals, (at, heavy) in zip(targets, top, strict=True):
                totals.top.append((where, at, heavy))

    def _keep(
        self,
        totals: list[LayerAccumulator],
        selection: QuerySelection,
        call: AttentionCall,
        lse: Tensor | None,
    ) -> None:
        """Store the rows of L queues of one group, stacked as [L · B, …] in `call`, and their
        log-sum-exp if the kernel uses it."""
        geometry, L = selection.geometry, len(totals)
        lse_by_queue: Sequence[Tensor | None] = [None] * L if lse is None else unstack(lse, L)
        where = positions(selection).to(call.q.device)
        n_visible = int(geometry.visible_ranges[1].max())
        by_queue = zip(totals, unstack(call.q, L), unstack(call.k, L), lse_by_queue, strict=True)
        for sums, q, k, sums_of_queue in by_queue:
            rows = rows_of(replace(call, q=q, k=k), selection.all_rows, sums_of_queue, 0)
            kept, more = store_rows(
                sums.stored,
                rows,
                where,
                geometry.first_key,
                n_visible,
                copy=self.cache_overwrites and L == 1,
            )
            sums.stored.append(kept)
            self._check_budget(sums, more)

    def _check_budget(self, totals: LayerAccumulator, more: int) -> None:
        """Raise as soon as the stored rows will exceed the memory budget."""
        if self.keep_budget is None:
            self.keep_budget = int(MAX_KEPT_SHARE * free_memory(self.device))
        totals.nbytes += more
        total = sum(each.nbytes for scope in self.parts.values() for each in scope._layers.values())
        if (need := max(total, totals.nbytes * self.layers)) > self.keep_budget:
            raise ScopeError(
                f"keep=True: queries and keys of {self.layers} layers need {need / 2**30:.2f} GiB "
                f"so far; the limit is {self.keep_budget / 2**30:.2f} GiB, half of the free "
                "memory. Measure fewer layers (layers=[…]) or queries (queries='last', or a mask)",
                code="not-enough-memory",
                need=need,
                limit=self.keep_budget,
            )
