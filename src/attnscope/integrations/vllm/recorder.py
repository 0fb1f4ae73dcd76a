"""Measures the requests of a worker while it runs: queries are pending until many are reduced.

A decode step has one query per request and layer. Its queries are copied to a buffer. They are
reduced together when the buffer is full, when the request ends, or before one of its pages gets new
keys. Chunks of a prompt with many queries are reduced at once, layer by layer.

The recorder raises no error inside a step, because that would end vLLM's engine. A request that
cannot be measured keeps its error, and the reader of the results gets it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnscope.errors import ModelError, ScopeError
from attnscope.integrations.vllm.measured import MeasuredRequest, Tables, giving_up
from attnscope.integrations.vllm.pending_queries import (
    DirectRows,
    PendingQueries,
    RecorderOptions,
)
from attnscope.integrations.vllm.reduction import AttentionLayer
from attnscope.integrations.vllm.requests import NewRequest, RequestOptions, Step

LARGE_ROWS = 256
"""Chunks with at least this many counted queries are reduced at once."""
HELD_STEPS = 8
"""Queries that are held back if a stop string may end the completion before the engine stops."""

Order = Callable[[], tuple[Sequence[str], Tensor | None]]
"""Gives the requests of the current step in the order of the query tensor, and the token ids of
its rows if they are known."""


@dataclass(eq=False, kw_only=True)
class _StepRows:
    """The measured part of a step, in the order of the query tensor."""

    index: Tensor | None
    """int64: rows of the query tensor that become pending; None if there are none."""
    at: int
    """Row of the buffer where they begin."""
    direct: list[DirectRows]
    probe: tuple[int, int, int] | None
    """A row of the query tensor, its row of the block table, and its position, of a request whose
    pages were not checked yet."""
    tables: Tables


class Recorder:
    """The measurements of one worker."""

    def __init__(self, layers: Sequence[AttentionLayer], options: RecorderOptions):
        self.options = options
        self.pending = PendingQueries(layers, options)
        self.groups = self.pending.groups
        self.where = {
            layer.name: (g, i)
            for g, group in enumerate(self.groups)
            for i, layer in enumerate(group)
        }
        self.requests: dict[str, MeasuredRequest] = {}
        self.planned: dict[str, list[int]] = {}
        """By request of the current step: positions of its counted queries."""
        self.step: Step | None = None
        self.current: _StepRows | None = None

    # One step of the worker.

    def begin(self, step: Step) -> None:
        """Prepare for a step: finish requests, and reduce queries whose pages may get new keys."""
        self.end()
        for name in step.finished:
            if name in self.requests:
                self._finish(self.requests[name])
        new_blocks = {block for blocks in step.blocks.values() for block in blocks}
        pending = [request for request in self.requests.values() if request.pending]
        overwritten = [one for one in pending if not one.blocks.isdisjoint(new_blocks)]
        if overwritten:
            self._flush(overwritten, final=True)
        for new in step.new:
            self._add(new)
        for name, (first, count) in step.tokens.items():
            request = self.requests.get(name)
            if request is not None and request.error is None:
                if name in step.replaced:
                    request.blocks = set()
                request.blocks.update(step.blocks.get(name, ()))
                self.planned[name] = list(request.advance(first, count))
        rows = sum(len(each) for each in self.planned.values() if len(each) < LARGE_ROWS)
        if self.pending.buffer.capacity and not self.pending.buffer.fits(rows):
            self._flush(self.requests.values())
            self.pending.compact(self.requests.values())
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
        with giving_up([self.requests[each] for each in self.planned]):
            if self.current is None:
                self.current = self._plan(query, *order())
            current, (g, i) = self.current, self.where[name]
            self.pending.caches[name] = cache
            current.tables.add(name, table)
            if key is not None and current.probe is not None:
                self._check_page(name, key, cache, table, current.probe)
            if current.index is not None:
                self.pending.buffer.store(g, i, current.at, query.index_select(0, current.index))
            self.pending.reduce_direct(g, i, query, current.direct)

    def end(self) -> None:
        """Finish a step."""
        if self.current is not None and self.current.direct:
            self._limit_memory()
        self.step, self.current, self.planned = None, None, {}

    # The plan of a step.

    def _add(self, new: NewRequest) -> None:
        """Start to measure a request; one that returns after a preemption goes on."""
        known = self.requests.get(new.id)
        if known is not None:
            if known.prompt_length != new.prompt_length:
                known.fail(_changed_prompt(new))
            return
        options = self.options
        if new.options is None and options.default is None:
            return
        late = new.stops_late and options.stop_strings_late
        request = MeasuredRequest(
            id=new.id,
            prompt_length=new.prompt_length,
            options=options.default or RequestOptions(),
            raw_options=new.options,
            hold=max(options.late_steps, HELD_STEPS) if late else options.late_steps,
            token_ids={} if new.prompt is None else dict(enumerate(new.prompt)),
        )
        self.requests[new.id] = request
        with giving_up([request]):
            if new.options is not None:
                request.options = RequestOptions.parse(new.options)

    def _plan(self, query: Tensor, ids: Sequence[str], tokens: Tensor | None) -> _StepRows:
        """Which rows of the query tensor belong to which request."""
        assert self.step is not None
        buffer = self.pending.buffer
        buffer.allocate(query)
        index: list[int] = []
        generated: list[tuple[MeasuredRequest, int, int]] = []
        current = _StepRows(index=None, at=buffer.used, direct=[], probe=None, tables=Tables())
        row = 0
        for table_row, name in enumerate(ids):
            first, count = self.step.tokens[name]
            if name in self.planned:
                request, positions = self.requests[name], self.planned[name]
                request.tables, request.table_row = current.tables, table_row
                if not request.known_pages:
                    request.known_pages = True
                    current.probe = row + count - 1, table_row, first + count - 1
                generated += [
                    (request, row + i, first + i)
                    for i in range(max(0, request.prompt_length - first), count)
                ]
                rows = [row + position - first for position in positions]
                if rows and (len(rows) >= LARGE_ROWS or not buffer.fits(len(rows))):
                    part = self.pending.rows(request, rows, positions, query.device)
                    current.direct.append(DirectRows(request, part))
                else:
                    numbers = range(buffer.used, buffer.used + len(rows))
                    request.pending += zip(numbers, positions, strict=True)
                    index += rows
                    buffer.used += len(rows)
            row += count
        if tokens is not None and generated:
            self.pending.token_rows.append((tokens[:row].clone(), generated))
        if index:
            current.index = torch.tensor(index, device=query.device)
        return current

    def _check_page(
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

    # Results.

    def _flush(self, requests: Iterable[MeasuredRequest], *, final: bool = False) -> None:
        self.pending.flush(requests, final=final)
        self._limit_memory()

    def _finish(self, request: MeasuredRequest) -> None:
        """Reduce all queries of a request before its pages are used again."""
        self._flush([request], final=True)
        self.pending.read_tokens()
        request.finish()
        if self.options.most_finished is not None:
            finished = [name for name, each in self.requests.items() if each.finished]
            for name in finished[: max(0, len(finished) - self.options.most_finished)]:
                del self.requests[name]
        self.pending.release(self.requests.values())

    def collect(
        self, lengths: Mapping[str, int | None], *, forget: bool = True
    ) -> dict[str, dict[str, Any]]:
        """The results of these requests.

        Args:
            lengths: By request: the number of tokens that belong to it; None for all that the
                model has read.
            forget: Whether finished requests are dropped then.
        """
        self.pending.read_tokens()
        results = {}
        for name, length in lengths.items():
            request = self.requests.get(name)
            if request is not None:
                results[name] = self._result(request, length)
                if forget and (request.finished or length is not None):
                    del self.requests[name]
        self.pending.release(self.requests.values())
        return results

    def _result(self, request: MeasuredRequest, length: int | None) -> dict[str, Any]:
        late = 0 if length is None else request.length - length
        length = request.length if length is None else length
        if request.tables is not None:
            self._flush([request], final=True)
        request.settle(length)
        if late > request.hold or late < 0:
            request.fail(_wrong_length(request, length))
        by_class = self.options.class_sets and request.options.by_class
        return request.result(self.groups, length) | {"by_class": bool(by_class)}

    def _limit_memory(self) -> None:
        """Drop the oldest finished requests if some may be dropped, then give up the largest."""
        sizes = {name: each.nbytes for name, each in self.requests.items()}
        total = sum(sizes.values())
        if total <= self.options.memory:
            return
        if self.options.most_finished is not None:
            for name in [name for name, each in self.requests.items() if each.finished]:
                if total > self.options.memory:
                    total -= sizes.pop(name)
                    del self.requests[name]
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            if total > self.options.memory:
                self.requests[name].fail(_too_large(total, len(sizes), self.options.memory))
                total -= sizes[name]


def _changed_prompt(new: NewRequest) -> ModelError:
    return ModelError(
        f"request {new.id!r} got a longer prompt while it ran; attnscope does not support "
        "streaming input",
        code="streaming-input",
        request=new.id,
    )


def _wrong_length(request: MeasuredRequest, length: int) -> ScopeError:
    return ScopeError(
        f"request {request.id!r} has {length} tokens, but the model read {request.length}. The "
        "engine stopped too late to leave the extra tokens out; end completions by "
        "stop_token_ids or max_tokens, or use VLLM_ENABLE_V1_MULTIPROCESSING=0",
        code="stopped-late",
        length=length,
        measured=request.length,
    )


def _too_large(total: int, requests: int, limit: int) -> ScopeError:
    return ScopeError(
        f"the sums of {requests} requests need {total / 2**20:.0f} MiB in the worker; the limit is "
        f"{limit / 2**20:.0f} MiB. Measure fewer layers (layers=[…]), or send fewer requests at a "
        "time",
        code="not-enough-memory",
        need=total,
        limit=limit,
    )
