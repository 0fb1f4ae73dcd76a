"""Measures the requests of a worker while it runs: rows are pending until many are reduced at once.

A decode step has one query per request and layer. Its queries are copied to a buffer. They are
reduced together when the buffer is full, when the request ends, or before one of its pages gets new
keys. Chunks of a prompt with many queries are reduced at once, layer by layer.

The recorder raises no error inside a step, because that would end vLLM's engine. A request that
cannot be measured keeps its error, and the reader of the results gets it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnscope.errors import AttnscopeError, ModelError, ScopeError
from attnscope.integrations.vllm.reduction import (
    AttentionLayer,
    RequestSums,
    Rows,
    group_layers,
    reduce_pages,
    reduce_rows,
    reduces_pages,
    row_weights,
    stack_sums,
)
from attnscope.integrations.vllm.requests import (
    NewRequest,
    RequestOptions,
    Step,
    TrackedRequest,
)

PENDING_BYTES = 64 << 20
"""The largest size of the buffer of pending queries, for all layers and requests together."""
MIN_PENDING = 64
"""Queries that the buffer holds at least."""
LARGE_ROWS = 256
"""Chunks with at least this many counted queries are reduced at once."""
HELD_STEPS = 8
"""Queries that are held back if a stop string may end the completion before the engine stops."""

Order = Callable[[], tuple[Sequence[str], Tensor | None]]
"""Gives the requests of the current step in the order of the query tensor, and the token ids of
its rows if they are known."""


Add = Callable[["Measured", Rows, RequestSums, Tensor | None], None]
"""Takes the sums of some rows of a request, and their weights if they are kept."""


@dataclass(eq=False, kw_only=True)
class Kept:
    """Attention rows of some queries of a request."""

    positions: list[int]
    weights: dict[int, Tensor]
    """By group of layers: float32 [L, H, M, K]."""


@dataclass(eq=False, kw_only=True)
class Measured(TrackedRequest):
    """A request with its pending queries and its sums."""

    pending: list[tuple[int, int]] = field(default_factory=list)
    """Row of the buffer and position of each pending query."""
    tables: "Tables | None" = None
    table_row: int = 0
    sums: dict[int, RequestSums] = field(default_factory=dict)
    """By group of layers."""
    held: list[tuple[int, dict[int, RequestSums]]] = field(default_factory=list)
    """The sums of queries that may not belong to the completion, by position."""
    kept: list[Kept] = field(default_factory=list)

    def pages(self, name: str) -> Tensor:
        """The block table in a layer."""
        assert self.tables is not None
        return self.tables.by_layer[name][self.table_row]

    def add(self, group: int, sums: RequestSums) -> None:
        """Add sums of a group of layers."""
        if group in self.sums:
            self.sums[group].add(sums)
        else:
            self.sums[group] = sums

    def fail(self, error: AttnscopeError) -> None:
        """Give up this request."""
        self.error = self.error or error
        self.pending, self.sums, self.held, self.kept, self.tables = [], {}, [], [], None

    @property
    def nbytes(self) -> int:
        """The memory of sums and kept rows."""
        sums = sum(each.nbytes for each in self.sums.values())
        return sum((w.nbytes for kept in self.kept for w in kept.weights.values()), sums)


@dataclass(eq=False)
class Tables:
    """The block tables of one step; layers of one KV cache group share a copy."""

    by_layer: dict[str, Tensor] = field(default_factory=dict)
    copies: dict[int, Tensor] = field(default_factory=dict)

    def add(self, name: str, table: Tensor) -> None:
        """Copy the table of a layer: vLLM overwrites it in the next step."""
        address = table.data_ptr()
        if address not in self.copies:
            self.copies[address] = table.clone()
        self.by_layer[name] = self.copies[address]


@dataclass(eq=False, kw_only=True)
class _Pass:
    """The part of a step that is measured, in the order of the query tensor."""

    index: Tensor | None
    """int64: rows of the query tensor that become pending; None if there are none."""
    at: int
    """Row of the buffer where they begin."""
    direct: list[tuple[Measured, Rows]]
    """Requests whose rows are reduced at once."""
    probe: tuple[int, int, int] | None
    """A row of the query tensor, its row of the block table, and its position, to check pages."""
    tables: Tables
    parts: dict[int, dict[str, list[tuple[RequestSums, Tensor | None]]]] = field(
        default_factory=dict
    )
    """By group of layers and request: sums and kept rows of the layers that have run."""


class Recorder:
    """The measurements of one worker.

    Args:
        layers: The measured layers.
        default: Options of requests that have none; None if such requests are not measured.
        backend: The kernel.
        memory: Bytes that sums and kept rows may use.
        late_steps: Steps that the engine may run after the end of a completion.
        stop_strings_late: Whether it may run more than that after a stop string.
        class_of: int64 [vocabulary]: the class of each token id, -1 for none; for `flow`.
        most_finished: Finished requests that are kept; the oldest ones are dropped. Default: all.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        *,
        default: RequestOptions | None,
        backend: str,
        memory: int,
        late_steps: int = 0,
        stop_strings_late: bool = False,
        class_of: Tensor | None = None,
        most_finished: int | None = None,
    ):
        self.most_finished = most_finished
        self.groups = group_layers(layers)
        self.default = default
        self.backend = backend
        self.memory = memory
        self.late_steps = late_steps
        self.stop_strings_late = stop_strings_late
        self.class_of = class_of
        self.n_classes = 0 if class_of is None else max(int(class_of.max()) + 1, 1)
        self.where = {
            layer.name: (g, i)
            for g, group in enumerate(self.groups)
            for i, layer in enumerate(group)
        }
        self.requests: dict[str, Measured] = {}
        self.caches: dict[str, Tensor] = {}
        """By layer: its KV cache."""
        self.buffers: list[Tensor] = []
        """For each group of layers: pending queries [L, capacity, H, D]."""
        self.used = 0
        """Rows of the buffers that are used."""
        self.token_rows: list[tuple[Tensor, list[tuple[Measured, int, int]]]] = []
        """Token ids that were not read from the device yet: rows, requests, positions."""
        self.planned: dict[str, list[int]] = {}
        """By request of the current step: positions of its counted queries."""
        self.step: Step | None = None
        self.current: _Pass | None = None

    # One step of the worker.

    def begin(self, step: Step) -> None:
        """Prepare for a step: finish requests, and reduce rows whose pages may get new keys."""
        self.end()
        for name in step.finished:
            if name in self.requests:
                self._finish(self.requests[name])
        new_blocks = {block for blocks in step.blocks.values() for block in blocks}
        self.flush(
            [
                request
                for request in self.requests.values()
                if request.pending and not request.blocks.isdisjoint(new_blocks)
            ],
            final=True,
        )
        for new in step.new:
            self._add(new)
        for name, (first, count) in step.tokens.items():
            request = self.requests.get(name)
            if request is None or request.error is not None:
                continue
            if name in step.replaced:
                request.blocks = set()
            request.blocks.update(step.blocks.get(name, ()))
            self.planned[name] = list(request.advance(first, count))
        rows = sum(len(each) for each in self.planned.values() if len(each) < LARGE_ROWS)
        if self.buffers and self.used + rows > self.capacity:
            self.flush(self.requests.values())
            self._compact()
        self.step = step

    def on_call(
        self,
        name: str,
        query: Tensor,
        key: Tensor | None,
        cache: Tensor,
        table: Tensor,
        order: Order,
    ) -> None:
        """Record the attention of one layer: queries and keys [T, heads, D], the KV cache, and
        the block table [requests, pages]."""
        if self.step is None or name not in self.where or not self.planned:
            return
        with self._failing(self._measured()):
            if self.current is None:
                self.current = self._plan(query, *order())
            current, (g, i) = self.current, self.where[name]
            self.caches[name] = cache
            current.tables.add(name, table)
            if key is not None and current.probe is not None:
                self._check_pages(name, key, cache, table, current.probe)
            if current.index is not None:
                rows = query.index_select(0, current.index)
                self.buffers[g][i, current.at : current.at + len(rows)] = rows
            self._reduce_direct(g, i, query, current)

    def end(self) -> None:
        """Finish a step."""
        self.step, self.current, self.planned = None, None, {}

    def _measured(self) -> list[Measured]:
        """The measured requests of the current step."""
        return [self.requests[name] for name in self.planned]

    # The plan of a step.

    def _add(self, new: NewRequest) -> None:
        """Start to measure a request; one that returns after a preemption goes on."""
        known = self.requests.get(new.id)
        if known is not None:
            if known.prompt_length != new.prompt_length:
                known.fail(_changed_prompt(new))
            return
        if new.options is None and self.default is None:
            return
        hold = self.late_steps
        if new.stops_late and self.stop_strings_late:
            hold = max(hold, HELD_STEPS)
        request = Measured(
            id=new.id,
            prompt_length=new.prompt_length,
            options=self.default or RequestOptions(),
            raw_options=new.options,
            hold=hold,
            token_ids={} if new.prompt is None else dict(enumerate(new.prompt)),
        )
        self.requests[new.id] = request
        with self._failing([request]):
            if new.options is not None:
                request.options = RequestOptions.parse(new.options)

    def _plan(self, query: Tensor, ids: Sequence[str], tokens: Tensor | None) -> _Pass:
        """Which rows of the query tensor belong to which request."""
        assert self.step is not None
        if not self.buffers:
            self._allocate(query)
        index: list[int] = []
        direct: list[tuple[Measured, Rows]] = []
        generated: list[tuple[Measured, int, int]] = []
        tables, at, row, probe = Tables(), self.used, 0, None
        for table_row, name in enumerate(ids):
            first, count = self.step.tokens[name]
            positions = self.planned.get(name)
            if positions is not None:
                request = self.requests[name]
                request.tables, request.table_row = tables, table_row
                probe = probe or (row + count - 1, table_row, first + count - 1)
                generated += [
                    (request, row + i, first + i)
                    for i in range(max(0, request.prompt_length - first), count)
                ]
                rows = [row + position - first for position in positions]
                fits = self.used + len(rows) <= self.capacity
                if rows and (len(rows) >= LARGE_ROWS or not fits):
                    direct.append((request, self._rows(request, rows, positions, query.device)))
                else:
                    request.pending += zip(
                        range(self.used, self.used + len(rows)), positions, strict=True
                    )
                    index += rows
                    self.used += len(rows)
            row += count
        if tokens is not None and generated:
            self.token_rows.append((tokens.clone(), generated))
        at_rows = torch.tensor(index, device=query.device) if index else None
        return _Pass(index=at_rows, at=at, direct=direct, probe=probe, tables=tables)

    def _rows(
        self, request: Measured, rows: list[int], positions: list[int], device: torch.device
    ) -> Rows:
        classes = None
        if self.class_of is not None:
            self._read_tokens()
            ids = [request.token_ids.get(position, -1) for position in positions]
            known = torch.tensor(ids)
            classes = self.class_of[known.clamp(min=0)].where(known >= 0, -1)
        return Rows(
            index=torch.tensor(rows, device=device),
            positions=torch.tensor(positions),
            pages=request.pages,
            classes=classes,
        )

    def _check_pages(
        self, name: str, key: Tensor, cache: Tensor, table: Tensor, probe: tuple[int, int, int]
    ) -> None:
        """Compare a key of this step with what its page holds."""
        if cache.device.type != "cpu":  # a comparison would wait for the device
            return
        g, i = self.where[name]
        row, table_row, position = probe
        page = cache.shape[2]
        pages = table[table_row, position // page : position // page + 1]
        stored = self.groups[g][i].layout.read(cache, pages)[:, position % page]
        if not torch.equal(stored, key[row].to(stored.dtype)):
            raise ModelError(
                f"{name}: the page of position {position} does not hold the key of this step, so "
                "attnscope cannot read this KV cache; please report this",
                code="unreadable-pages",
                layer=name,
            )

    # Pending rows.

    @property
    def capacity(self) -> int:
        """Rows that the buffers hold."""
        return self.buffers[0].shape[1] if self.buffers else 0

    def _allocate(self, query: Tensor) -> None:
        sizes = [(len(group), group[0].heads, group[0].layout.size) for group in self.groups]
        per_row = sum(L * H * D for L, H, D in sizes) * query.element_size()
        capacity = max(MIN_PENDING, PENDING_BYTES // per_row)
        self.buffers = [query.new_empty(L, capacity, H, D) for L, H, D in sizes]

    def flush(self, requests: Iterable[Measured], *, final: bool = False) -> None:
        """Reduce the pending rows of these requests.

        Rows that may not belong to the completion stay pending. With `final` they are reduced
        too, each for itself, because the pages will change.
        """
        held, ready = {}, []
        for request in requests:
            split = len(request.pending) - min(request.hold, len(request.pending))
            held[request.id] = request, request.pending[split:]
            if split:
                ready.append((request, self._pending_rows(request, request.pending[:split])))
        for g, group in enumerate(self.groups if ready else ()):
            self._reduce(g, group, self.buffers[g], ready)
        for request, rows in held.values():
            with self._failing([request]):
                if final:
                    for each in rows:
                        self._hold(request, each)
                    rows = []
                self._settle(request)
                request.pending = rows
                self._check_memory(request)

    def _pending_rows(self, request: Measured, pending: list[tuple[int, int]]) -> Rows:
        at, positions = [row for row, _ in pending], [position for _, position in pending]
        return self._rows(request, at, positions, self.buffers[0].device)

    def _reduce_direct(self, g: int, i: int, query: Tensor, current: _Pass) -> None:
        """Reduce many rows of one layer; the last layer of a group adds the sums of all."""
        parts = current.parts.setdefault(g, {})

        def add(request: Measured, rows: Rows, sums: RequestSums, kept: Tensor | None) -> None:
            layers = parts.setdefault(request.id, [])
            layers.append((sums, kept))
            if len(layers) == len(self.groups[g]):
                del parts[request.id]
                weights = [each for _, each in layers if each is not None]
                joined = stack_sums([each for each, _ in layers])
                self._add_sums(request, g, rows, joined, torch.cat(weights) if weights else None)
                self._check_memory(request)

        self._reduce(g, [self.groups[g][i]], query[None], current.direct, add)

    def _reduce(
        self,
        g: int,
        layers: Sequence[AttentionLayer],
        q: Tensor,
        items: Sequence[tuple[Measured, Rows]],
        add: "Add | None" = None,
    ) -> None:
        """Reduce rows of several requests; `add` gets the sums and the kept rows of each."""
        caches = [self.caches[each.name] for each in layers]
        live = [(request, rows) for request, rows in items if request.error is None]
        paged = reduces_pages(layers, q, caches[0], self.backend) and self.class_of is None
        together = [(request, rows) for request, rows in live if paged and rows.contiguous]
        sums: dict[str, RequestSums] = {}
        if together:
            with self._failing([request for request, _ in together]):
                each = reduce_pages(layers, q, caches, [rows for _, rows in together])
                sums = {item[0].id: one for item, one in zip(together, each, strict=True)}
        for request, rows in live:
            with self._failing([request]):
                one = sums.get(request.id)
                if one is None:
                    one = reduce_rows(
                        layers, q, caches, rows, backend=self.backend, n_classes=self.n_classes
                    )
                kept = row_weights(layers, q, caches, rows) if request.options.keep else None
                if add is None:
                    self._add_sums(request, g, rows, one, kept)
                else:
                    add(request, rows, one, kept)

    def _add_sums(
        self, request: Measured, g: int, rows: Rows, sums: RequestSums, weights: Tensor | None
    ) -> None:
        request.add(g, sums)
        if weights is None:
            return
        positions: list[int] = rows.positions.tolist()
        if not request.kept or request.kept[-1].positions != positions:
            request.kept.append(Kept(positions=positions, weights={}))
        request.kept[-1].weights[g] = weights

    def _hold(self, request: Measured, pending: tuple[int, int]) -> None:
        """Reduce a row for itself."""
        sums, request.sums = request.sums, {}
        rows = self._pending_rows(request, [pending])
        for g, group in enumerate(self.groups):
            self._reduce(g, group, self.buffers[g], [(request, rows)])
        request.held.append((pending[1], request.sums))
        request.sums = sums

    def _settle(self, request: Measured, length: int | None = None) -> None:
        """Add held rows that belong to the completion: those before `length`."""
        length = request.length - request.hold if length is None else length
        for position, sums in request.held:
            if position < length:
                for g, each in sums.items():
                    request.add(g, each)
        request.held = [each for each in request.held if each[0] >= length]

    def _compact(self) -> None:
        """Move the rows that are still pending to the start of the buffers."""
        rows = sorted(row for request in self.requests.values() for row, _ in request.pending)
        new = {row: i for i, row in enumerate(rows)}
        for request in self.requests.values():
            request.pending = [(new[row], position) for row, position in request.pending]
        self.used = len(rows)
        if rows:
            index = torch.tensor(rows, device=self.buffers[0].device)
            for buffer in self.buffers:
                buffer[:, : len(rows)] = buffer.index_select(1, index)

    def _finish(self, request: Measured) -> None:
        """Reduce all rows of a request before its pages are used again."""
        request.finished = True
        self.flush([request], final=True)
        request.tables = None
        if self.most_finished is not None:
            finished = [name for name, each in self.requests.items() if each.finished]
            for name in finished[: max(0, len(finished) - self.most_finished)]:
                del self.requests[name]
        if not any(each.pending for each in self.requests.values()):
            self.used = 0

    # Results.

    def collect(
        self, lengths: Mapping[str, int | None], *, forget: bool = True
    ) -> dict[str, dict[str, Any]]:
        """The results of these requests.

        Args:
            lengths: By request: the number of tokens that belong to it; None for all that the
                model has read.
            forget: Whether finished requests are dropped then.
        """
        self._read_tokens()
        results = {}
        for name, length in lengths.items():
            request = self.requests.get(name)
            if request is not None:
                results[name] = self._result(request, length)
                if forget and (request.finished or length is not None):
                    del self.requests[name]
        if not any(each.pending for each in self.requests.values()):
            self.used = 0
        return results

    def _result(self, request: Measured, length: int | None) -> dict[str, Any]:
        late = 0 if length is None else request.length - length
        length = request.length if length is None else length
        if request.tables is not None:
            self.flush([request], final=True)
        self._settle(request, length)
        if late > request.hold or late < 0:
            request.fail(_wrong_length(request, length))
        result: dict[str, Any] = {
            "prompt_length": request.prompt_length,
            "length": length,
            "token_ids": [request.token_ids.get(i, -1) for i in range(length)],
            "missing": request.missing_queries(),
            "queries": request.options.queries,
            "options": request.raw_options,
            "groups": [],
            "error": None,
        }
        if request.error is not None:
            return result | {"error": request.error}
        for g, group in enumerate(self.groups):
            kept = [(each.positions, each.weights[g]) for each in request.kept]
            result["groups"].append(
                {
                    "layers": [layer.layer for layer in group],
                    "window": group[0].window,
                    "sums": request.sums.get(g),
                    "kept": [each for each in kept if each[0][0] < length],
                }
            )
        return result

    def _read_tokens(self) -> None:
        """Read the ids of generated tokens from the device."""
        for tokens, rows in self.token_rows:
            ids = tokens.tolist()
            for request, row, position in rows:
                request.token_ids[position] = ids[row]
        self.token_rows = []

    # Errors.

    @contextmanager
    def _failing(self, requests: Iterable[Measured]) -> Any:
        """Give up these requests if their measurement raises an error."""
        try:
            yield
        except Exception as error:  # an error here would end vLLM's engine
            if not isinstance(error, AttnscopeError):
                error = ModelError(
                    f"the measurement of this request failed: {type(error).__name__}: {error}",
                    code="measurement-failed",
                )
            for request in requests:
                request.fail(error)

    def _check_memory(self, request: Measured) -> None:
        total = sum(each.nbytes for each in self.requests.values())
        if self.most_finished is not None:
            for name in [name for name, each in self.requests.items() if each.finished]:
                if total > self.memory:
                    total -= self.requests.pop(name).nbytes
        if total > self.memory:
            raise ScopeError(
                f"the sums of {len(self.requests)} requests need {total / 2**20:.0f} MiB in the "
                f"worker; the limit is {self.memory / 2**20:.0f} MiB. Measure fewer layers "
                "(layers=[…]), or send fewer requests at a time",
                code="not-enough-memory",
                need=total,
                limit=self.memory,
            )


def _changed_prompt(new: NewRequest) -> ModelError:
    return ModelError(
        f"request {new.id!r} got a longer prompt while it ran; attnscope does not support "
        "streaming input",
        code="streaming-input",
        request=new.id,
    )


def _wrong_length(request: Measured, length: int) -> ScopeError:
    return ScopeError(
        f"request {request.id!r} has {length} tokens, but the model read {request.length}. The "
        "engine stopped too late to leave the extra tokens out; end completions by "
        "stop_token_ids or max_tokens, or use VLLM_ENABLE_V1_MULTIPROCESSING=0",
        code="stopped-late",
        length=length,
        measured=request.length,
    )
