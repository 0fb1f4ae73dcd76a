"""Queries that wait to be reduced, and the way from them to the sums of their requests."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscope.integrations.vllm.measured import (
    MeasuredRequest,
    Reduced,
    giving_up,
    stack_reduced,
)
from attnscope.integrations.vllm.query_buffer import QueryBuffer
from attnscope.integrations.vllm.reduction import (
    AttentionLayer,
    Rows,
    group_layers,
    reduce_pages,
    reduce_rows,
    reduces_pages,
    row_weights,
)
from attnscope.integrations.vllm.requests import RequestOptions
from attnscope.kernels import AttentionSums


@dataclass(frozen=True, kw_only=True)
class RecorderOptions:
    """What a recorder measures, and how."""

    default: RequestOptions | None
    """Options of requests that have none; None if such requests are not measured."""
    backend: str
    """The kernel."""
    memory: int
    """Bytes that sums and kept rows may use."""
    late_steps: int = 0
    """Steps that the engine may run after the end of a completion."""
    stop_strings_late: bool = False
    """Whether it may run more than that after a stop string."""
    class_of: Tensor | None = None
    """int64 [vocabulary]: the class of each token id, -1 for none; for `flow`."""
    class_sets: Mapping[str, Tensor] = field(default_factory=dict)
    """By name: float32 [vocabulary, classes], the share of each token id in each class. With these
    sums by key become sums by class, if that is enough for a request."""
    most_finished: int | None = None
    """Finished requests that are kept; the oldest ones are dropped. Default: all."""


@dataclass(eq=False)
class DirectRows:
    """Queries of a request that are reduced at once."""

    request: MeasuredRequest
    rows: Rows
    parts: dict[int, list[Reduced]] = field(default_factory=dict)
    """By group: the layers that have run."""


class PendingQueries:
    """The pending queries of all requests of a worker."""

    def __init__(self, layers: Sequence[AttentionLayer], options: RecorderOptions):
        self.options = options
        self.groups = group_layers(layers)
        self.buffer = QueryBuffer(self.groups)
        self.caches: dict[str, Tensor] = {}
        """By layer: its KV cache."""
        self.n_classes = 0
        if options.class_of is not None:
            self.n_classes = max(int(options.class_of.max()) + 1, 1)
        self.token_rows: list[tuple[Tensor, list[tuple[MeasuredRequest, int, int]]]] = []
        """Token ids that were not read from the device yet: rows, requests, positions."""

    def rows(
        self, request: MeasuredRequest, rows: list[int], positions: list[int], device: torch.device
    ) -> Rows:
        """Rows of a query tensor as queries of a request."""
        classes, class_of = None, self.options.class_of
        if class_of is not None:
            self.read_tokens()
            known = torch.tensor([request.token_ids.get(position, -1) for position in positions])
            classes = class_of[known.clamp(min=0)].where(known >= 0, -1)
        return Rows(
            index=torch.tensor(rows, device=device),
            positions=torch.tensor(positions),
            pages=request.pages,
            classes=classes,
        )

    def flush(self, requests: Iterable[MeasuredRequest], *, final: bool = False) -> None:
        """Reduce the pending queries of these requests.

        Queries that may not belong to the completion stay pending. With `final` they are reduced
        too, each for itself, because the pages will change.
        """
        held, ready = [], []
        for request in requests:
            split = max(0, len(request.pending) - request.hold)
            held.append((request, request.pending[split:]))
            if split:
                ready.append((request, self._pending_rows(request, request.pending[:split])))
        for g in range(len(self.groups) if ready else 0):
            for (request, rows), reduced in zip(ready, self._reduce_pending(g, ready), strict=True):
                if reduced is not None:
                    self._add(request, g, rows, reduced)
        for request, pending in held:
            if request.error is None:
                for each in pending if final else ():
                    self._hold(request, each)
                request.settle(request.length - request.hold)
                request.pending = [] if final else pending

    def _hold(self, request: MeasuredRequest, pending: tuple[int, int]) -> None:
        """Reduce a query for itself."""
        rows = self._pending_rows(request, [pending])
        by_group: dict[int, Reduced] = {}
        for g in range(len(self.groups)):
            reduced = self._reduce_pending(g, [(request, rows)])[0]
            if reduced is not None:
                by_group[g] = self._by_class(request, reduced)
        if request.error is None:
            request.held.append((pending[1], by_group))

    def _pending_rows(self, request: MeasuredRequest, pending: list[tuple[int, int]]) -> Rows:
        numbers, positions = [row for row, _ in pending], [position for _, position in pending]
        return self.rows(request, numbers, positions, self.buffer.tensors[0].device)

    def _reduce_pending(
        self, g: int, items: Sequence[tuple[MeasuredRequest, Rows]]
    ) -> list[Reduced | None]:
        return self._reduce(self.groups[g], self.buffer.tensors[g], items)

    def reduce_direct(self, g: int, i: int, query: Tensor, direct: Sequence[DirectRows]) -> None:
        """Reduce the queries of one layer; the last layer of a group adds the sums of all."""
        if not direct:
            return
        items = [(each.request, each.rows) for each in direct]
        layer = [self.groups[g][i]]
        for each, reduced in zip(direct, self._reduce(layer, query[None], items), strict=True):
            parts = each.parts.setdefault(g, [])
            if reduced is not None:
                parts.append(reduced)
            if len(parts) == len(self.groups[g]):
                self._add(each.request, g, each.rows, stack_reduced(each.parts.pop(g)))

    def _add(self, request: MeasuredRequest, g: int, rows: Rows, reduced: Reduced) -> None:
        request.add(g, rows.positions.tolist(), self._by_class(request, reduced))

    def _reduce(
        self,
        layers: Sequence[AttentionLayer],
        q: Tensor,
        items: Sequence[tuple[MeasuredRequest, Rows]],
    ) -> list[Reduced | None]:
        """The numbers of some queries of each request; None for a request that fails."""
        caches, backend = [self.caches[each.name] for each in layers], self.options.backend
        n_classes, sums = self.n_classes, dict[str, AttentionSums]()
        paged = [each for each in items if each[1].contiguous and each[0].error is None]
        if paged and not n_classes and reduces_pages(layers, q, caches[0], backend):
            with giving_up([request for request, _ in paged]):
                reduced_pages = reduce_pages(layers, q, caches, [rows for _, rows in paged])
                sums = {
                    request.id: one for (request, _), one in zip(paged, reduced_pages, strict=True)
                }
        results: list[Reduced | None] = []
        for request, rows in items:
            reduced = None
            with giving_up([request]):
                if request.error is None:
                    one = sums.get(request.id)
                    if one is None:
                        one = reduce_rows(layers, q, caches, rows, backend, n_classes)
                    keep = request.options.keep
                    weights = row_weights(layers, q, caches, rows) if keep else None
                    reduced = Reduced(one, weights)
            results.append(reduced)
        return results

    def _by_class(self, request: MeasuredRequest, reduced: Reduced) -> Reduced:
        """Sums by key as sums over the first token and over each class, if that is enough."""
        shares = self.options.class_sets.get(request.options.classes)
        if shares is None or not request.options.by_class:
            return reduced
        self.read_tokens()
        sums = reduced.sums
        ids = torch.tensor(request.ids(sums.received.shape[-1]))
        columns = pad(shares[ids.clamp(min=0)] * (ids >= 0)[:, None], (1, 0))
        columns[0, 0] = 1
        columns = columns.to(sums.received)
        later = sums.received_later @ columns
        return replace(
            reduced, sums=replace(sums, received=sums.received @ columns, received_later=later)
        )

    def compact(self, requests: Collection[MeasuredRequest]) -> None:
        """Move the queries that are still pending to the start of the buffer."""
        pending = [row for request in requests for row, _ in request.pending]
        new = self.buffer.compact(pending)
        for request in requests:
            request.pending = [(new[row], position) for row, position in request.pending]

    def release(self, requests: Iterable[MeasuredRequest]) -> None:
        """Use the buffer from its start again if nothing is pending."""
        if not any(each.pending for each in requests):
            self.buffer.used = 0

    def read_tokens(self) -> None:
        """Read the ids of generated tokens from the device."""
        if not self.token_rows:
            return
        ids = torch.cat([tokens for tokens, _ in self.token_rows]).tolist()
        start = 0
        for tokens, rows in self.token_rows:
            for request, row, position in rows:
                request.token_ids[position] = ids[start + row]
            start += len(tokens)
        self.token_rows = []
