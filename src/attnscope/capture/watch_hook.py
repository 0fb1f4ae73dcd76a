"""The hook behind `watch`: it queues attention calls and decides when they are measured."""

import sys
from collections.abc import Collection
from typing import Any

import torch

from attnscope.capture import hooks, sites
from attnscope.capture.cache_guard import guard_cache, unguard_cache
from attnscope.capture.forward_pass import CallSpec
from attnscope.capture.generation import CompletionSpan, GenerationTracker
from attnscope.capture.geometry import Geometry, concat
from attnscope.capture.hook_registry import CapturedCall, DeferredCall, on_cpu
from attnscope.capture.pending import (
    PassQueue,
    SiteQueue,
    cached_keys,
    free_memory,
    group_by_signature,
    is_large,
    keys_are_stable,
    stack_queues,
    without_tensors,
)
from attnscope.capture.reduce import Reducer
from attnscope.capture.scope import Scope
from attnscope.capture.sites import Site
from attnscope.capture.stored_rows import cache_overwrites
from attnscope.capture.sums import LayerAccumulator, StackedSums
from attnscope.errors import ModelError, ScopeError
from attnscope.kernels.call import WITHOUT_FLOAT64
from attnscope.kernels.tile_plan import balanced_step

# Pending calls may always use this many bytes. Below it, the hook does not ask the device for its
# free memory, because that takes longer than a kernel launch.
MIN_BUDGET = 64 << 20


class WatchHook:
    """The hook of one `watch`: receives the attention calls of a model and updates its scopes."""

    needs_geometry = True

    def __init__(
        self,
        model_sites: sites.Sites,
        measured: set[Site],
        parts: dict[str, Scope],
        backend: str,
        device: torch.device,
        *,
        top: int,
        keep: bool,
        max_pending: float,
    ):
        self.parts = parts
        """The scope of each part: a stack, or "cross"."""
        self.measured = measured
        self.measures_all = len(measured) == len(model_sites.all_sites)
        self.bases = model_sites.base_models
        self.device = device
        self.needs_rows = bool(top or keep)
        """Whether per-query attention rows are stored in addition to the sums."""
        self.reducer = Reducer(
            parts, backend, self.device, layers=len(self.measured), top=top, keep=keep
        )
        self.generations = {
            stack: GenerationTracker(base, self.flush)
            for stack, base in model_sites.base_models.items()
        }
        self.sites_run: dict[str, set[Site]] = {}
        """Sites that ran in the current pass, by stack. Between passes it is empty. It stays empty
        while gradient checkpointing runs layers a second time, so that run is not measured."""
        self.passes_started: set[str] = set()
        """Stacks whose current pass has made its first attention call."""
        self.leaders: dict[CallSpec, tuple[SiteQueue | None, CompletionSpan, int]] = {}
        """The first call of each call signature in the current pass: its queue (None if no query
        counts), its completion span, and its bytes."""
        self.pass_queue: PassQueue | None = None
        """Pending calls of the current pass that are reduced with its first call, in one launch."""
        self.geometries: list[Geometry] = []
        """The geometries of the current passes."""
        self.pending: dict[Site, SiteQueue] = {}
        """Calls that are not measured yet, by site."""
        self.max_pending = max_pending
        """The share of free memory that pending calls may use."""
        self.budget: int | None = None
        self.pending_bytes = 0
        self.cache: dict[str, Any] = {}
        """The KV cache of the current pass, by stack."""
        self.guarded: Any = None
        """The KV cache that is guarded now. The hook guards only one cache, because a list would
        keep all caches in memory."""
        for scope in parts.values():
            scope._flush = self.flush

    def begin(self, stack: str, cache: Any) -> None:
        """Prepare for a forward pass of a stack."""
        self.sites_run[stack] = set()
        self.passes_started.discard(stack)
        self.leaders.clear()
        self._split_pass_queue()
        self.cache[stack] = cache
        self.generations[stack].begin_pass()
        for scope in self._scopes(stack):
            scope._pass_started, scope._pass_done = True, False
            scope._measured_early.clear()
        self.reducer.cache_overwrites = cache_overwrites(cache)
        self._guard(cache)

    def wants(self, site: Site) -> bool:
        """Whether this site is measured in the current pass."""
        if site.stack not in self.sites_run:
            return False
        if site in self.sites_run[site.stack]:
            raise ModelError(
                f"layer {site.layer} calls its attention function more than once in one forward "
                "pass, with different queries or keys. attnscope supports one call per layer. "
                "Causes: one call per image, or layers that share a module. Pass one image or text "
                "at a time",
                code="repeated-attention",
                layer=site.layer,
            )
        self.sites_run[site.stack].add(site)
        return site in self.measured

    def on_call(self, captured: CapturedCall) -> None:
        """Reduce one attention call now, or queue it."""
        if captured.geometry is not None and captured.geometry.device.type in WITHOUT_FLOAT64:
            captured = on_cpu(captured)
        assert captured.geometry is not None
        site, geometry = captured.site, captured.geometry
        if not self.geometries or self.geometries[-1] is not geometry:
            self.geometries.append(geometry)
        can_defer = captured.lse is not None and not captured.changed and self.max_pending > 0
        queue = self.pending.get(site)
        if queue is not None and can_defer and site.stack in self.passes_started:
            self._enqueue(queue, captured)  # one more decode step
            return
        span = self.generations[site.stack].span(geometry.first_query, geometry.queries)
        step = geometry.queries == 1 and geometry.first_query >= span.start
        if site.stack not in self.passes_started:
            self._prepare_for_pass(site.stack, geometry, step=step)
        elif queue is not None:
            self.flush_pending()
        scope = self.parts[site.part]
        if (
            captured.spec is not None
            and can_defer
            and self._start_pass_queue(scope, captured, captured.spec, span)
        ):
            return
        totals = self._accumulator(scope, site.layer, geometry, span)
        if captured.weights is not None:
            self.reducer.reduce_weights(
                scope, captured.weights, geometry, totals, span, sinks=captured.sinks
            )
            return
        assert captured.call is not None
        if scope._queries.counts_no_query(geometry, span):
            if captured.spec is not None and can_defer:
                self.leaders[captured.spec] = None, span, 0
            return
        if not can_defer or is_large(captured.call):
            self.reducer.reduce(
                [SiteQueue(site=site, call=captured.call, span=span, decode_steps=step)],
                geometry,
                captured.call.q,
                captured.call.k,
                captured.lse,
            )
            if geometry.first_query == 0:  # this layer makes no further call in this pass
                scope._measured_early.add(site.layer)
                scope._verified = False
            return
        queue = self.pending.get(site)
        if queue is None:
            queue = SiteQueue(
                site=site, call=without_tensors(captured.call), span=span, decode_steps=step
            )
        self._enqueue(queue, captured)

    def needs_tensors(self, sites: Collection[Site]) -> list[bool]:
        """For each site, whether it is measured."""
        if self.measures_all:
            return [True] * len(sites)
        return [site in self.measured for site in sites]

    def queue_limit(self, site: Site, spec: CallSpec) -> tuple[int, bool]:
        """How many more calls of this signature may be queued, and whether they keep tensors."""
        queue, leader = self.pending.get(site), self.leaders.get(spec)
        if self.max_pending == 0 or spec.geometry.device.type in WITHOUT_FLOAT64:
            return 0, True
        if queue is not None and queue.decode_steps:
            for other in self.pending.values() if len(queue.geometries) > 1 else ():
                if other.geometries[-1] is queue.geometries[-2]:
                    cache = self.cache.get(other.site.stack)
                    other.release_keys(spec.geometry, cached_keys(cache, other.site.layer))
            return sys.maxsize, True
        if leader is None:
            return 0, True
        if leader[0] is None:
            return sys.maxsize, False
        bytes_per_call, limit = leader[2], MIN_BUDGET
        if self.pending_bytes + bytes_per_call * len(self.measured) > MIN_BUDGET:
            limit = max(limit, self._budget())
        return max(0, limit - self.pending_bytes) // bytes_per_call, True

    def on_deferred_calls(self, spec: CallSpec, calls: list[DeferredCall]) -> None:
        """Queue calls with the same signature as an earlier call of this pass."""
        self.sites_run[calls[0][0].stack].update([call[0] for call in calls])
        measured = calls
        if not self.measures_all:
            measured = [call for call in calls if call[0] in self.measured]
        pass_queue = self.pass_queue
        if pass_queue is not None and pass_queue.spec is spec:
            pass_queue.calls += measured  # type: ignore[arg-type]
            self.pending_bytes += pass_queue.bytes_per_call * len(measured)
            # Flush before the budget is full: stacking may copy the tensors, which doubles memory.
            if (
                self.pending_bytes + pass_queue.bytes_per_call > MIN_BUDGET
                and not self._within_budget(self.pending_bytes + pass_queue.bytes_per_call)
            ):
                self.flush_pending()
            return
        geometry, (leader, span, bytes_per_call) = spec.geometry, self.leaders[spec]
        keys = geometry.keys
        for site, q, k, lse in measured:
            queue = self.pending.get(site)
            if queue is None:
                self._accumulator(self.parts[site.part], site.layer, geometry, span)
                if leader is None:
                    continue
                queue = SiteQueue(
                    site=site, call=leader.call, span=span, decode_steps=leader.decode_steps
                )
                self.pending[site] = queue
            assert q is not None
            assert k is not None
            assert lse is not None
            k = k if keys == k.shape[2] else k[:, :, :keys]
            self.pending_bytes += queue.add(geometry, q, k, lse, bytes_per_call)

    def _start_pass_queue(
        self, scope: Scope, captured: CapturedCall, spec: CallSpec, span: CompletionSpan
    ) -> bool:
        """Try to start a queue for the whole pass, so that all layers are reduced in one launch.

        Returns False if that is not possible.
        """
        geometry, call = spec.geometry, captured.call
        if (
            self.pending
            or self.needs_rows
            or spec.attend is None  # other calls are delivered one by one
            or len(self.parts) > 1
            or geometry.first_query
            or geometry.first_key
            or geometry.keys != spec.shapes[1][2]  # a static cache has more keys than tokens
            or call is None
            or captured.lse is None
            or is_large(call)
            or scope._queries.counts_no_query(geometry, span)
        ):
            return False
        queue = SiteQueue(
            site=captured.site, call=without_tensors(call), span=span, decode_steps=False
        )
        nbytes = queue.add(geometry, call.q, call.k, captured.lse)
        if not self._within_budget(nbytes):
            return False
        self.pending[captured.site] = queue
        self.pending_bytes = nbytes
        self.leaders[spec] = queue, span, nbytes
        self.pass_queue = PassQueue(spec=spec, leader=queue)
        return True

    def _split_pass_queue(self) -> None:
        """Split the queue of the pass into queues by site."""
        pass_queue, self.pass_queue = self.pass_queue, None
        if pass_queue is None:
            return
        leader, spec = pass_queue.leader, pass_queue.spec
        scope = self.parts[leader.site.part]
        if leader.site.layer not in scope._layers:
            self._accumulator(scope, leader.site.layer, spec.geometry, leader.span)
        for site, q, k, lse in pass_queue.calls:
            self._accumulator(scope, site.layer, spec.geometry, leader.span)
            queue = SiteQueue(site=site, call=leader.call, span=leader.span, decode_steps=False)
            queue.add(spec.geometry, q, k, lse)
            self.pending[site] = queue

    def _enqueue(self, queue: SiteQueue, captured: CapturedCall) -> None:
        assert captured.geometry is not None
        assert captured.call is not None
        assert captured.lse is not None
        self.pending[queue.site] = queue
        bytes_per_call = queue.add(
            captured.geometry, captured.call.q, captured.call.k, captured.lse
        )
        self.pending_bytes += bytes_per_call
        if captured.spec is not None:
            self.leaders[captured.spec] = queue, queue.span, bytes_per_call
        if not queue.decode_steps and not self._within_budget(self.pending_bytes):
            self.flush_pending()

    def _prepare_for_pass(self, stack: str, geometry: Geometry, *, step: bool) -> None:
        """Handle pending calls at the first attention call of a pass, and store its input ids.

        A decode step is added to the queues. Any other continuation flushes the queues. A new
        sequence drops them.
        """
        self.passes_started.add(stack)
        if geometry.first_query == 0:
            self._drop_pending(stack)
            for scope in self._scopes(stack):
                scope._clear()
        elif not (step and all(queue.decode_steps for queue in self.pending.values())):
            self.flush_pending()
        forward_pass = hooks.last_pass(self.bases[stack])
        for scope in self._scopes(stack):
            if geometry.first_query == 0:
                scope._input_ids = []
            scope._input_ids.append(forward_pass.tokens)
            scope._padding = forward_pass.padding

    def end(self, stack: str, *, finished: bool) -> None:
        """Finish a forward pass. A pass that failed has no results."""
        sites_run, cache = self.sites_run.pop(stack, set()), self.cache.pop(stack, None)
        for scope in self._scopes(stack):
            scope._measured_early.clear()
        if not finished:
            self._drop_pending(stack)
            return
        if not sites_run:
            raise ModelError(
                "the forward pass made no attention call that attnscope supports. Either the model "
                "has no attention, or its attention modules must call "
                "ALL_ATTENTION_FUNCTIONS.get_interface in their forward method",
                code="no-attention",
            )
        for scope in self._scopes(stack):
            scope._pass_done, scope._verified = True, False
        for queue in self.pending.values():
            queue.restore()
        if self.pending and (
            self.pass_queue is not None
            or not (self._keys_are_stable(cache) and self._within_budget(self.pending_bytes))
        ):
            self.flush_pending()
        for geometry in self.geometries:  # tensors that kernels share between layers
            geometry.clear_caches()
        self.geometries.clear()

    def _drop_pending(self, stack: str) -> None:
        self.pass_queue = None
        self.pending = {site: queue for site, queue in self.pending.items() if site.stack != stack}
        self.pending_bytes = sum(queue.nbytes for queue in self.pending.values())

    def _keys_are_stable(self, cache: Any) -> bool:
        """Whether all pending calls may stay pending after this pass.

        They may if they are decode steps and the cache does not overwrite their keys.
        """
        in_generate = any(generation.call is not None for generation in self.generations.values())
        return all(
            queue.decode_steps
            and site.kind == "self"
            # Checked once: a model uses its cache in the same way in every step.
            and (
                len(queue.geometries) > 1
                or keys_are_stable(
                    cache, site.layer, queue.key_segments[-1][1], in_generate=in_generate
                )
            )
            for site, queue in self.pending.items()
        )

    def _within_budget(self, size: int) -> bool:
        """Whether pending calls may use this many bytes."""
        if size <= MIN_BUDGET and self.max_pending > 0:
            return True
        return size <= self._budget()

    def _budget(self) -> int:
        if self.budget is None:
            self.budget = int(self.max_pending * free_memory(self.device))
        return self.budget

    def flush(self) -> None:
        """Measure all pending calls.

        Conservation is checked at once on a CPU. On other devices it is checked before the first
        result is read, because the check waits for the device.
        """
        self.flush_pending()
        for scope in self.parts.values():
            scope._dtype = self.reducer.dtype
            if not scope._verified and self.device.type == "cpu":
                scope._verify()

    def finish(self) -> None:
        """Measure what is pending and release the cache, at the end of the `with` block."""
        try:
            self.flush()
        finally:
            self.release_cache()
            for scope in self.parts.values():
                scope._flush = None

    def flush_pending(self) -> None:
        """Measure all pending calls, those with the same signature together."""
        if self._flush_pass_queue():
            return
        self._split_pass_queue()
        queues, self.pending, self.pending_bytes = list(self.pending.values()), {}, 0
        for queue in queues:
            queue.restore()
        for group in group_by_signature(queues):
            self._flush_group(group)

    def _flush_pass_queue(self) -> bool:
        """Measure all layers of a pass in one launch, if they are queued together.

        The sums are split by layer when a layer is first read.
        """
        pass_queue, scope = self.pass_queue, next(iter(self.parts.values()))
        if pass_queue is None or len(self.pending) != 1:
            return False
        if not (
            self.reducer.reads_in_place(pass_queue.leader.q[0])
            or self._within_budget(pass_queue.size)
        ):
            return False
        leader, geometry = pass_queue.leader, pass_queue.spec.geometry
        selection = self.reducer.select(scope, geometry, leader.span)
        layers = [leader.site.layer, *(site.layer for site, *_ in pass_queue.calls)]
        if selection is None or selection.sampled:
            return False
        self.pass_queue, self.pending, self.pending_bytes = None, {}, 0
        self.reducer.dtype = leader.q[0].dtype
        sums = self.reducer.reduce_stacked(scope, pass_queue, selection)
        sums.lse = None  # as large as all other fields together
        scope._by_layer.pop(layers[0], None)  # it is empty
        scope._stacked.append(
            StackedSums(
                layers=layers,
                sums=sums,
                selection=selection,
                turn=leader.span.turn,
                continued=leader.span.call is not None,
                provisional=scope._queries.provisional(geometry, leader.span),
            )
        )
        return True

    def _scopes(self, stack: str) -> list[Scope]:
        """The scopes of this stack."""
        return [scope for scope in self.parts.values() if scope._stack == stack]

    def _guard(self, cache: Any) -> None:
        if cache is not self.guarded:
            self.release_cache()
            self.guarded = cache
            guard_cache(cache, self)

    def release_cache(self) -> None:
        """Restore the methods of the guarded cache."""
        unguard_cache(self.guarded, self)
        self.guarded = None

    def _accumulator(
        self, scope: Scope, layer: int, geometry: Geometry, span: CompletionSpan
    ) -> LayerAccumulator:
        """The sums of a layer: new ones for a new sequence, the present ones for a continuation."""
        if geometry.first_query == 0:
            scope._layers[layer] = LayerAccumulator(
                first_token=geometry.first_token, all_started=geometry.all_started, turn=span.turn
            )
        elif layer not in scope._layers:
            raise ScopeError(
                "this forward pass continues a KV cache that was filled before the with block; "
                "run the whole sequence inside the block",
                code="cache-from-before",
            )
        totals = scope._layers[layer]
        if geometry.first_query > 0:
            totals.compute_deferred()
            totals.check_contiguous(geometry)
        totals.continued |= geometry.first_query > 0 or span.call is not None
        totals.position = geometry.first_query + geometry.queries
        totals.keys = geometry.first_key + geometry.keys
        if totals.turn != span.turn and scope._queries.name == "predicts":
            totals.commit()
        totals.turn = span.turn
        return totals

    def _flush_group(self, queues: list[SiteQueue]) -> None:
        """Measure queues with the same signature, as many at once as fit into the budget."""
        step, size = len(queues), max(queue.size for queue in queues)
        while step > 1 and not self._within_budget(step * size):
            step = balanced_step(len(queues), step - 1)
        geometry = concat(queues[0].geometries)
        for at in range(0, len(queues), step):
            some = queues[at : at + step]
            self.reducer.reduce(some, geometry, *stack_queues(some))
        geometry.clear_caches()
