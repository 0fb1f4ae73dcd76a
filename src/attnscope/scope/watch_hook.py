"""The hook behind `watch`: it queues attention calls and has them measured.

Any source of `CapturedCall`s can drive it: `begin`, then `on_call` for every call, then `end`.
"""

from dataclasses import dataclass, field
from typing import Any

from attnscope.errors import ModelError
from attnscope.interception.cache_guard import guard_cache, unguard_cache
from attnscope.interception.captured_call import CapturedCall
from attnscope.interception.forward_pass import ForwardPass
from attnscope.interception.generation import CompletionSpan, Spans
from attnscope.interception.geometry import Geometry
from attnscope.interception.hooks import Hook
from attnscope.interception.sites import Site
from attnscope.kernels.call import WITHOUT_FLOAT64
from attnscope.scope.gather_heads import GatherHeads
from attnscope.scope.pending import Moment, PendingCalls, cache_overwrites, stable_cache_layer
from attnscope.scope.reduce import Reducer
from attnscope.scope.text_sums import TextSums


@dataclass(slots=True, eq=False)
class _RunningPass:
    """The forward pass of a stack that is running."""

    forward_pass: ForwardPass
    sites: set[Site] = field(default_factory=set)
    """Sites that ran."""
    geometries: dict[int, tuple[Geometry, CompletionSpan, bool]] = field(default_factory=dict)
    """By id: the geometries, each with its completion span and whether it may have counted
    queries."""


class WatchHook(Hook):
    """The hook of one `watch`: receives the attention calls of a model and updates its sums."""

    in_graphs = True
    keeps_values = False

    def __init__(
        self,
        measured: set[Site],
        reducer: Reducer,
        spans: dict[str, Spans],
        gathering: GatherHeads | None = None,
    ):
        self.measured = measured
        self.reducer = reducer
        self.needs_scores = reducer.max_logit
        self.parts = reducer.parts
        self.spans = spans
        """By stack: which tokens of a pass are prompt and which are completion."""
        # The reference builds full matrices, so it gets one layer at a time.
        self.pending = PendingCalls(reducer.device, together=reducer.backend != "reference")
        self.passes: dict[str, _RunningPass] = {}
        """By stack. Empty between passes, also while gradient checkpointing runs layers a second
        time, so that run is not measured."""
        self.guarded: Any = None
        """The KV cache that is guarded now: one, because a list would keep all in memory."""
        self.gathering = gathering
        """Gathers heads that are split over processes."""
        for text in self.parts.values():
            text._flush = self.flush
            if gathering is not None:
                gathering.prepare(text)

    def begin(self, stack: str, forward_pass: ForwardPass) -> None:
        """Prepare for a forward pass of a stack."""
        self.passes[stack] = _RunningPass(forward_pass)
        self.spans[stack].begin_pass()
        for text in self._texts(stack):
            text._begin_pass()
        cache = forward_pass.cache
        self.reducer.cache_overwrites = cache_overwrites(cache)
        if cache is not self.guarded:
            self._guard(cache)

    def wants(self, site: Site) -> bool:
        """Whether this site is measured in the current pass."""
        running = self.passes.get(site.stack)
        if running is None:
            return False
        if site in running.sites:
            raise ModelError(
                f"layer {site.layer} calls its attention function more than once in one forward "
                "pass, with different queries or keys. attnscope supports one call per layer. "
                "Causes: one call per image or window, or layers that share a module. Pass one "
                "image or text at a time",
                code="repeated-attention",
                layer=site.layer,
            )
        running.sites.add(site)
        return site in self.measured

    def on_call(self, captured: CapturedCall) -> None:
        """Queue one attention call, and measure pending calls if they are due."""
        if captured.geometry.device.type in WITHOUT_FLOAT64:
            captured = captured.on_cpu()
        site = captured.site
        span, counts = self._span(site, captured.geometry)
        self.parts[site.part]._capture(site.layer, captured.geometry, span)
        if self.gathering is not None:
            self.gathering.due = True
        if captured.weights is not None:
            self.reducer.reduce_weights(captured, span)
            return
        if not counts:
            return
        before = self.pending.calls.get(site)
        if before is not None and not before.is_continued_by(captured, span):
            self._flush_at("call that does not follow")
            before = None
        cache_layer = None if before is not None else self._cache_layer(captured, span)
        self.pending.add(captured, span, cache_layer)
        self._flush_at("call", captured)

    def _span(self, site: Site, geometry: Geometry) -> tuple[CompletionSpan, bool]:
        """The completion span of a call, and whether a query of it may count."""
        running = self.passes[site.stack]
        known = running.geometries.get(id(geometry))
        if known is None:
            span = self.spans[site.stack].span(geometry.first_query, geometry.queries)
            if not running.geometries:
                self._start(site.stack, geometry)
            counts = not self.parts[site.part]._queries.counts_no_query(geometry, span)
            known = running.geometries[id(geometry)] = geometry, span, counts
        return known[1:]

    def _start(self, stack: str, geometry: Geometry) -> None:
        """Before the first attention call of a pass: a new text deletes the results of the last."""
        if geometry.first_query == 0:
            self.pending.drop(stack)
        for text in self._texts(stack):
            if geometry.first_query == 0:
                text._clear()
            text._add_input(self.passes[stack].forward_pass)

    def _cache_layer(self, captured: CapturedCall, span: CompletionSpan) -> Any:
        """The layer of the KV cache that holds the keys of a decode step; None if it may change."""
        site, k, geometry = captured.site, captured.k, captured.geometry
        decode_step = geometry.queries == 1 and geometry.first_query >= span.start
        if not decode_step or site.kind != "self" or captured.lse is None or k is None:
            return None
        cache = self.passes[site.stack].forward_pass.cache
        in_generate = any(spans.in_generate for spans in self.spans.values())
        return stable_cache_layer(cache, site.layer, k, in_generate=in_generate)

    def end(self, stack: str, *, finished: bool) -> None:
        """Finish a forward pass. A pass that failed has no results."""
        running = self.passes.pop(stack, None)
        ran = running is not None and bool(running.sites)
        for text in self._texts(stack):
            text._end_pass(finished=finished and ran)
        if not finished:
            self.pending.drop(stack)
            return
        if running is None or not ran:
            raise ModelError(
                "the forward pass made no attention call that attnscope supports. Either the model "
                "has no attention, or its attention modules must call "
                "ALL_ATTENTION_FUNCTIONS.get_interface in their forward method",
                code="no-attention",
            )
        if self.gathering is None or any(spans.in_generate for spans in self.spans.values()):
            self._flush_at("pass ends")
        else:
            self.gathering.gather(self.parts)
        for geometry, _, _ in running.geometries.values():
            geometry.clear_caches()  # tensors that kernels share between layers

    def _flush_at(self, moment: Moment, captured: CapturedCall | None = None) -> None:
        """Measure all pending calls if they are due."""
        if self.pending.calls and self.pending.is_due(moment, captured):
            self.reducer.reduce_all(self.pending)

    def flush(self, moment: Moment = "read") -> None:
        """Measure all pending calls.

        Conservation is checked at once on a CPU. On other devices it is checked before the first
        result is read, because the check waits for the device. Heads that are split over processes
        are gathered when `generate` or the block ends, if no pass has failed.
        """
        if self.gathering is not None and self.gathering.due and moment != "read":
            if not any(text._failed for text in self.parts.values()):
                self.gathering.gather(self.parts)
            return
        self._flush_at(moment)
        if self.reducer.device.type == "cpu":
            for text in self.parts.values():
                text._verify()

    def finish(self) -> None:
        """Measure what is pending and release the cache, at the end of the `with` block."""
        try:
            self.flush("leave")
        finally:
            self._guard(None)
            for text in self.parts.values():
                text._flush = None

    def _guard(self, cache: Any) -> None:
        """Guard this cache in place of the one before."""
        unguard_cache(self.guarded, self)
        self.guarded = cache
        guard_cache(cache, self)

    def _texts(self, stack: str) -> list[TextSums]:
        """The sums of this stack, and of its cross-attention."""
        return [text for text in self.parts.values() if text._stack == stack]
