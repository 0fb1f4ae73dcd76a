"""Reduces the counted rows of attention calls to blocks of sums: `Reducer`."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnscope import kernels
from attnscope.errors import ConservationError, ScopeError
from attnscope.interception.captured_call import CallSpec, CapturedCall
from attnscope.interception.generation import CompletionSpan
from attnscope.interception.geometry import Geometry, concat
from attnscope.kernels import AttentionSums, reference
from attnscope.kernels.rows import rows_of
from attnscope.kernels.tile_plan import balanced_step
from attnscope.scope.conservation import compare_unseen, received_unseen
from attnscope.scope.pending import (
    PendingCalls,
    SiteCalls,
    free_memory,
    is_large,
    stack_calls,
    unstack,
)
from attnscope.scope.query_selection import QuerySelection, select
from attnscope.scope.sampling import exact_lse, spot_check
from attnscope.scope.stored_rows import StoredRows, store_rows, store_weights
from attnscope.scope.sums import SumsBlock, add_sink, add_sums, at_position, sink_weights
from attnscope.scope.text_sums import TextSums

# The share of free memory that stored queries and keys may use.
MAX_KEPT_SHARE = 0.5


class Reducer:
    """Turns attention calls into blocks of sums, and stores rows if `keep` is set."""

    def __init__(
        self,
        parts: dict[str, TextSums],
        backend: str,
        device: torch.device,
        *,
        keep: bool = False,
        max_logit: bool = False,
    ):
        self.parts = parts
        """The sums of each part: a stack, or "cross"."""
        self.backend = backend
        self.device = device
        self.keep = keep
        self.max_logit = max_logit or keep
        """Whether to compute the largest score of every head."""
        self.cache_overwrites = False
        """Whether the cache may overwrite the keys of the current pass."""
        self.keep_budget: int | None = None
        """The bytes that stored rows may use; None before it is known."""

    def kernel_for(self, q: Tensor) -> str:
        """The kernel for these queries; a layer may be on another device than the model."""
        elsewhere = self.backend == "triton" and q.device.type != self.device.type
        return "streaming" if elsewhere else self.backend

    def reduce_all(self, pending: PendingCalls) -> None:
        """Reduce all pending calls: of each group, as many at once as fit into memory."""
        for group in pending.take():
            geometry, step = concat(group[0].geometries), len(group)
            while (
                step > 1
                and not self._reads_in_place(group)
                and not pending.fits(step * group[0].size)
            ):
                step = balanced_step(len(group), step - 1)
            for at in range(0, len(group), step):
                self._reduce(group[at : at + step], geometry)
            geometry.clear_caches()

    def _reads_in_place(self, group: list[SiteCalls]) -> bool:
        """Whether the kernel reduces several layers without stacking a copy."""
        q, calls = group[0].q[0], len(group[0].geometries)
        return self.kernel_for(q) == "triton" and q.element_size() == 2 and calls == 1

    def _reduce(self, group: list[SiteCalls], geometry: Geometry) -> None:
        """Reduce the calls of a group: the only way from queries and keys to sums."""
        first, text = group[0], self.parts[group[0].site.part]
        spec = first.spec
        if geometry is not spec.geometry:  # decode steps, concatenated
            spec = replace(spec, geometry=geometry, visible=geometry.visible)
        layers = tuple(calls.site.layer for calls in group)
        block = _new_block(text, layers, first.q[0].dtype, geometry, first.span)
        if block is None:
            return
        selection = block.selections[0]
        if not self.keep:
            block.sums = self._in_place(group, spec, selection, text._groups)
        if block.sums is None:
            stacked = stack_calls(group)
            block.compute = partial(self._compute, spec, selection, text._groups, layers, *stacked)
            if self.keep:
                self._store_rows(text, block, spec, *stacked)
            # Sums of a long stored text are computed when they are read: rows do not need them.
            lazy = self.keep and is_large(first.q[0]) and geometry.first_query == 0
            if not lazy or self.cache_overwrites or len(group) > 1:
                block.computed()
        text._add_block(block)

    def _compute(
        self,
        spec: CallSpec,
        selection: QuerySelection,
        groups: int,
        layers: tuple[int, ...],
        q: Tensor,
        k: Tensor,
        lse: Tensor | None,
    ) -> AttentionSums:
        """The sums of some layers, from their stacked tensors."""
        L, backend, error = len(layers), self.kernel_for(q), None
        if selection.sampled:  # every block needs the log-sum-exp of whole rows
            lse, error = exact_lse(spec, q, k, lse, backend, L)
            spot_check(layers, spec, q, k, lse, backend)
        parts = []
        for block in selection.blocks:
            repeated, largest = block.repeat(L), self.max_logit
            rows = rows_of(spec, q, k, repeated, lse, groups, L, max_logit=largest)
            parts.append(compare_unseen(rows, kernels.kernel(backend)(rows)))
        sums = parts[0]
        for more in parts[1:]:
            sums = add_sums(sums, more)
        if error is not None:
            sums.lse_error = error
        if spec.sinks is not None:
            known = sums.lse
            if selection.sampled:
                known = rows_of(spec, q, k, selection.all_rows.repeat(L), lse, 0, L).lse
            assert known is not None
            positions = selection.positions().repeat(L, 1)
            add_sink(sums, sink_weights(spec.sinks, known), positions)
        return at_position(sums, spec.geometry.first_key)

    def _in_place(
        self, group: list[SiteCalls], spec: CallSpec, selection: QuerySelection, groups: int
    ) -> AttentionSums | None:
        """The sums of several layers without stacking a copy; None if the kernel cannot."""
        all_rows, first = selection.all_rows, group[0]
        layers = kernels.layers_kernel(self.kernel_for(first.q[0]))
        lse = [calls.lse[0] for calls in group if calls.lse[0] is not None]
        if (
            layers is None
            or selection.sampled
            or len(group) == 1
            or len(first.geometries) > 1
            or spec.sinks is not None
            or len(lse) < len(group)
            or not (all_rows.index is None or all_rows.single_row is not None)
        ):
            return None
        q, k = [calls.q[0] for calls in group], [calls.keys() for calls in group]
        rows = rows_of(spec, q[0], k[0], all_rows, lse[0], groups, max_logit=self.max_logit)
        sums = layers(rows, q, k, lse, all_rows.single_row or 0)
        if sums is None:
            return None
        return at_position(compare_unseen(rows, sums), spec.geometry.first_key)

    def reduce_weights(self, captured: CapturedCall, span: CompletionSpan) -> None:
        """Reduce the weight matrix of a layer, before the next layer runs."""
        text, A, site = self.parts[captured.site.part], captured.weights, captured.site
        assert captured.spec is not None
        assert A is not None
        text.backend = "eager-fallback"
        block = _new_block(text, (site.layer,), A.dtype, captured.geometry, span)
        if block is None:
            return
        selection, has_sinks = block.selections[0], captured.spec.sinks is not None
        A = _counted_weights(A, selection)
        block.sums = _reduce_weights(A, selection, text._groups, has_sinks=has_sinks)
        if captured.row_max is not None:
            counted = (selection.positions() >= 0).to(A.device)[:, None]
            scores = selection.all_rows.take(captured.row_max, 2)
            block.sums.max_logit = scores.where(counted, -torch.inf).amax(2).float()
        if self.keep:
            rows = store_weights(A, selection.positions().to(A.device), captured.geometry.first_key)
            self._keep(text, block, site.layer, rows)
        text._add_block(block)

    def _store_rows(
        self,
        text: TextSums,
        block: SumsBlock,
        spec: CallSpec,
        q: Tensor,
        k: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Store the counted rows of each layer, with their log-sum-exp if the kernel uses it."""
        selection, L = block.selections[0], len(block.layers)
        with_lse = lse is not None and self.kernel_for(q) == "triton"
        by_layer = unstack(lse, L) if lse is not None and with_lse else [None] * L
        tensors = zip(block.layers, unstack(q, L), unstack(k, L), by_layer, strict=True)
        for layer, layer_q, layer_k, layer_lse in tensors:
            rows = store_rows(
                text._stored_rows(layer),
                rows_of(spec, layer_q, layer_k, selection.all_rows, layer_lse),
                selection.positions().to(q.device),
                spec.geometry.first_key,
                int(spec.geometry.visible_ranges[1].max()),
                copy=self.cache_overwrites and L == 1,
            )
            self._keep(text, block, layer, rows)

    def _keep(self, text: TextSums, block: SumsBlock, layer: int, rows: StoredRows) -> None:
        """Add stored rows to a block; raise as soon as they will exceed the memory budget."""
        block.stored[layer] = [rows]
        if self.keep_budget is None:
            self.keep_budget = int(MAX_KEPT_SHARE * free_memory(self.device))
        text._kept_bytes[layer] = text._kept_bytes.get(layer, 0) + rows.nbytes
        layers = sum(len(part.layers) for part in self.parts.values())
        total = sum(sum(part._kept_bytes.values()) for part in self.parts.values())
        if (need := max(total, text._kept_bytes[layer] * layers)) > self.keep_budget:
            raise ScopeError(
                f"keep=True: queries and keys of {layers} layers need {need / 2**30:.2f} GiB "
                f"so far; the limit is {self.keep_budget / 2**30:.2f} GiB, half of the free "
                "memory. Measure fewer layers (layers=[…]) or queries (queries='last', or a mask)",
                code="not-enough-memory",
                need=need,
                limit=self.keep_budget,
            )


def _new_block(
    text: TextSums,
    layers: tuple[int, ...],
    dtype: torch.dtype,
    geometry: Geometry,
    span: CompletionSpan,
) -> SumsBlock | None:
    """A block without sums, with the counted rows of a call; None if no row counts."""
    key = text._queries, span
    if key not in geometry.selections:
        geometry.selections[key] = select(
            text._queries, geometry, span, text._classes, text._groups
        )
    selection: QuerySelection | None = geometry.selections[key]
    if selection is None:
        return None
    provisional = text._queries.provisional(geometry, span)
    return SumsBlock(layers=layers, dtype=dtype, selections=[selection], provisional=provisional)


def _counted_weights(A: Tensor, selection: QuerySelection) -> Tensor:
    """float32 [B, H, M, K]: the counted rows of a weight matrix, 0 on padding."""
    counted = selection.positions() >= 0
    # Rows that do not count may hold any value, also NaN.
    A = selection.all_rows.take(A, 2).float()
    A = A.masked_fill(~counted[:, None, :, None].to(A.device), 0.0)
    real = selection.geometry.real_keys
    return A if real is None else A * real[:, None, None].to(A.device)


def _reduce_weights(
    A: Tensor, selection: QuerySelection, groups: int, *, has_sinks: bool
) -> AttentionSums:
    """The sums of counted rows A. They are not sampled, because the matrix exists already."""
    geometry = selection.geometry
    counted = (selection.positions() >= 0).to(A.device)
    self_key = selection.gather_rows(geometry.self_keys().expand(geometry.batch, -1)).to(A.device)
    group = None if selection.group is None else selection.gather_rows(selection.group).to(A.device)
    row_sum = A.sum(-1)
    sums = reference.totals(A, self_key, row_sum.log(), counted.float(), None, group, groups)
    deviation = ((row_sum - 1).abs() * counted[:, None]).max().item()
    if has_sinks:
        add_sink(sums, 1 - row_sum, selection.positions())
    elif deviation > 2e-2:  # a check at the end of the pass finds NaN
        raise ConservationError(
            f"a row of attention weights adds up to 1 only within {deviation:.3g}; dropout changes "
            "the weights in training, so call model.eval() first; a softmax with an extra term is "
            "not supported",
            code="row-sum",
            deviation=deviation,
        )
    sums = received_unseen(sums, ~selection.visibility().to(A.device).any(2))
    return at_position(sums, geometry.first_key)
