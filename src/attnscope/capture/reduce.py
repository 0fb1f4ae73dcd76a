"""From attention to the sums of a scope: the rows that count, through a kernel.

Must not know when: what waits, and for whom, is the recorder's.
"""

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
from attnscope.capture.pending import PassQueue, SiteQueue, free_memory, large, one_after_another
from attnscope.capture.query_selection import select
from attnscope.capture.sampling import audit, whole_rows
from attnscope.capture.scope import Scope
from attnscope.capture.stored_rows import keep, keep_weights
from attnscope.capture.sums import LayerAccumulator, by_lane, split
from attnscope.errors import ConservationError, ModelError, ScopeError
from attnscope.kernels import AttentionCall, AttentionSums

# The share of free memory that queries and keys may take which are kept beyond their pass.
KEEP = 0.5


class Reducer:
    """Adds attention to the sums of some scopes, and keeps rows where that was asked for."""

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
        """By part: a stack, or "cross"."""
        self.backend = backend
        self.device = device
        self.layers = layers
        """How many are measured, of all parts."""
        self.top = top
        self.keep = keep
        self.keep_room: int | None = None
        self.rewritten = True
        """Whether the keys of the pass under way may be written over."""
        self.dtype = torch.float32
        """Of the queries measured last."""

    def kernel_for(self, q: Tensor) -> str:
        """The kernel for these queries: one layer of a model spread over devices may lie
        elsewhere."""
        elsewhere = self.backend == "triton" and q.device.type != self.device.type
        return "streaming" if elsewhere else self.backend

    def in_place(self, q: Tensor) -> bool:
        """Whether layers are as a rule reduced together without laying them side by side."""
        return self.kernel_for(q) == "triton" and q.element_size() == 2

    def select(self, scope: Scope, frame: Geometry, reply: CompletionSpan) -> QuerySelection | None:
        """The counted rows of a frame."""
        key = scope._queries, reply
        if key not in frame.selections:
            frame.selections[key] = select(
                scope._queries, frame, reply, scope._classes, scope._groups
            )
        return frame.selections[key]

    def _target(
        self,
        scope: Scope,
        totals: LayerAccumulator,
        frame: Geometry,
        reply: CompletionSpan,
        selection: QuerySelection | None,
    ) -> LayerAccumulator:
        """The sums to add the counted rows of a frame to."""
        if selection is None or not scope._queries.tentative(frame, reply):
            return totals
        if totals.tentative is None:
            totals.tentative = LayerAccumulator(first=totals.first)
            return totals.tentative
        again = selection.count > 0
        if bool(again.all()):
            totals.tentative = LayerAccumulator(first=totals.first)
        else:
            totals.tentative.drop(again)
        return totals.tentative

    def reduce_weights(
        self,
        scope: Scope,
        A: Tensor,
        frame: Geometry,
        totals: LayerAccumulator,
        reply: CompletionSpan,
        *,
        sinks: bool,
    ) -> None:
        """The fallback: a layer's whole matrix, reduced before the next layer runs."""
        self.dtype = A.dtype
        scope.backend = "eager-fallback"
        selection = self.select(scope, frame, reply)
        sums = self._target(scope, totals, frame, reply, selection)
        if selection is not None:
            A = dense_fallback.reduce(
                A, frame, selection, sums, scope._groups, self.top, has_sinks=sinks
            )
            if self.keep:
                kept, more = keep_weights(A, positions(selection).to(A.device))
                sums.kept.append(kept)
                self._bounded(sums, more)

    def reduce(
        self, lanes: list[SiteQueue], frame: Geometry, q: Tensor, k: Tensor, lse: Tensor | None
    ) -> None:
        """Reduce the rows of lanes that are alike: [L · B, …], lane by lane."""
        first = lanes[0]
        scope = self.parts[first.site.part]
        targets = []
        selection = self.select(scope, frame, first.reply)
        for lane in lanes:
            totals = scope._layers[lane.site.layer]
            totals.position = max(totals.position, frame.first_query + frame.queries)
            totals.keys = max(totals.keys, frame.first_key + frame.keys)
            targets.append(self._target(scope, totals, frame, lane.reply, selection))
        if selection is None:
            return
        self.dtype = q.dtype
        backend = self.kernel_for(q)
        call = replace(first.call, q=q, k=k, v=k[:, :, :0])
        if len(first.frames) > 1:
            call = replace(call, visible=frame.visible)
        for totals in targets:
            totals.selections.append(selection)
            totals.sampled |= selection.sampled
        if self.keep:
            self._keep(targets, selection, call, lse if backend == "triton" else None)
        if self._may_owe(lanes, selection, frame):
            self._owe(scope, lanes, targets[0], (call, frame, selection, lse, backend))
            return
        self._add(lanes, targets, call, frame, selection, lse, backend)

    def of_layers(self, scope: Scope, tail: PassQueue, selection: QuerySelection) -> AttentionSums:
        """The totals of all layers of a pass that waited, [L · B, …], layer by layer."""
        part, first = selection.whole, tail.first
        q, k, lse = tail.tensors()
        backend = self.kernel_for(q[0])
        layers = kernels.layers(backend)
        if layers is not None and (part.index is None or part.only is not None):
            call = replace(first.call, q=q[0], k=k[0])
            rows = rows_of(call, part, lse[0], scope._groups)
            sums = layers(rows, q, k, lse, part.only or 0)
            if sums is not None:
                return compare_unseen(rows, sums)
        L = len(q)
        call = replace(first.call, q=one_after_another(q), k=one_after_another(k))
        rows = rows_of(call, part.times(L), torch.cat(lse), scope._groups, L)
        return compare_unseen(rows, kernels.kernel(backend)(rows))

    def _may_owe(self, lanes: list[SiteQueue], selection: QuerySelection, frame: Geometry) -> bool:
        """Whether sums can wait until they are read: of a long text whose queries and keys are
        kept anyway, and stay what they are. Who asks for rows alone does not pay for them."""
        scope = self.parts[lanes[0].site.part]
        return (
            self.keep
            and not (self.rewritten or self.top or scope._groups or selection.sampled)
            and len(lanes) == 1
            and frame.first_query == 0
            and not scope._queries.tentative(frame, lanes[0].reply)
            and large(lanes[0].call)
        )

    def _owe(
        self, scope: Scope, lanes: list[SiteQueue], totals: LayerAccumulator, what: Any
    ) -> None:
        layer, dtype = lanes[0].site.layer, self.dtype
        light = [replace(lanes[0], call=what[0])]  # without the values

        def owed() -> None:
            self._add(light, [totals], *what)
            try:
                scope._check(dtype, layer)
            except (ConservationError, ModelError):
                del scope._layers[layer]
                raise

        totals.owed = owed

    def _add(
        self,
        lanes: list[SiteQueue],
        targets: list[LayerAccumulator],
        call: AttentionCall,
        frame: Geometry,
        selection: QuerySelection,
        lse: Tensor | None,
        backend: str,
    ) -> None:
        """Reduce the rows of a selection, and add them to the sums of each lane."""
        L, reduce = len(lanes), kernels.kernel(backend)
        groups = self.parts[lanes[0].site.part]._groups
        if selection.sampled:  # every part needs the log-sum-exp of whole rows
            lse, drift = whole_rows(call, frame, lse, backend, L)
            audit(lanes, call, frame, lse, backend)
            for totals, own_drift in zip(targets, by_lane(drift, L), strict=True):
                totals.drifted(own_drift)
        for part in selection.parts:
            rows = rows_of(call, part.times(L), lse, groups, L)
            sums = compare_unseen(rows, reduce(rows))
            for totals, own in zip(targets, split(sums, L), strict=True):
                totals.add(own, frame.first_key)
        if call.sinks is None and not self.top:
            return
        rows = rows_of(call, selection.whole.times(L), lse, 0, L)
        if call.sinks is not None:
            known = rows.lse if selection.sampled else sums.lse
            assert known is not None
            for lane, totals, own_lse in zip(lanes, targets, by_lane(known, L), strict=True):
                assert lane.call.sinks is not None
                taken = torch.exp(lane.call.sinks.detach().double()[:, None] - own_lse)
                totals.add_sink(taken, selection)
        if self.top:
            told = kernels.tell_rows(backend)(rows, kernels.PerQueryRequest(top=self.top))
            keys, weights = told.top_key, told.top_weight
            assert keys is not None
            assert weights is not None
            where = positions(selection).to(keys.device)
            keys = keys.where(keys < 0, keys + frame.first_key)
            found = zip(by_lane(keys, L), by_lane(weights, L), strict=True)
            for totals, (at, heavy) in zip(targets, found, strict=True):
                totals.top.append((where, at, heavy))

    def _keep(
        self,
        totals: list[LayerAccumulator],
        selection: QuerySelection,
        call: AttentionCall,
        lse: Tensor | None,
    ) -> None:
        """Keep the rows of L lanes that are alike, [L · B, …] as in `call`; and the log-sum-exp
        that a kernel can make use of."""
        frame, L = selection.frame, len(totals)
        given: Sequence[Tensor | None] = [None] * L if lse is None else by_lane(lse, L)
        where = positions(selection).to(call.q.device)
        seen = int(frame.intervals[1].max())
        of_lanes = zip(totals, by_lane(call.q, L), by_lane(call.k, L), given, strict=True)
        for sums, q, k, own in of_lanes:
            rows = rows_of(replace(call, q=q, k=k), selection.whole, own, 0)
            kept, more = keep(
                sums.kept, rows, where, frame.first_key, seen, copy=self.rewritten and L == 1
            )
            sums.kept.append(kept)
            self._bounded(sums, more)

    def _bounded(self, totals: LayerAccumulator, more: int) -> None:
        """Refuse to keep more than there is room for, as soon as that can be told."""
        if self.keep_room is None:
            self.keep_room = int(KEEP * free_memory(self.device))
        totals.held += more
        held = sum(each.held for part in self.parts.values() for each in part._layers.values())
        if (need := max(held, totals.held * self.layers)) > self.keep_room:
            raise ScopeError(
                f"keep=True: queries and keys of {self.layers} layers need {need / 2**30:.2f} GiB "
                f"so far; the limit is {self.keep_room / 2**30:.2f} GiB, half of the free memory. "
                "Measure fewer layers (layers=[…]) or fewer queries (queries='last', or a mask)",
                code="not-enough-memory",
                need=need,
                limit=self.keep_room,
            )
