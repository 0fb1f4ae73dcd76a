"""One watch at work: an observer of a model's attention, which decides what is measured when.

Must not know how attention becomes sums: that is `reducing.py`.
"""

import sys
from collections.abc import Collection
from typing import Any

import torch

from attnscope.capture import hooks, sites
from attnscope.capture.cache_guard import guard_cache, unguard_cache
from attnscope.capture.forward_pass import CallSpec
from attnscope.capture.generation import CompletionSpan, GenerationTracker
from attnscope.capture.geometry import Geometry, join
from attnscope.capture.hook_registry import CapturedCall, DeferredCall, on_cpu
from attnscope.capture.pending import (
    PassQueue,
    SiteQueue,
    alike,
    bare,
    cached_keys,
    free_memory,
    large,
    lasting,
    together,
)
from attnscope.capture.reduce import Reducer
from attnscope.capture.scope import Scope
from attnscope.capture.sites import Site
from attnscope.capture.stored_rows import rewritten
from attnscope.capture.sums import LayerAccumulator, StackedSums
from attnscope.errors import ModelError, ScopeError
from attnscope.kernels.call import WITHOUT_FLOAT64
from attnscope.kernels.tile_plan import even

# Bytes that may wait anywhere: asking the device how many it has free takes longer than a launch.
LITTLE = 64 << 20


class WatchHook:
    """One watch at work: observes the attention of a model and keeps its scopes up to date."""

    needs_geometry = True

    def __init__(
        self,
        found: sites.Sites,
        measured: set[Site],
        parts: dict[str, Scope],
        backend: str,
        device: torch.device,
        *,
        top: int,
        keep: bool,
        hold: float,
    ):
        self.parts = parts
        """By part: a stack, or "cross"."""
        self.measured = measured
        self.everything = len(measured) == len(found.all_sites)
        self.bases = found.base_models
        self.device = device
        self.apart = bool(top or keep)
        """Whether more is read of layers than their sums."""
        self.reducer = Reducer(
            parts, backend, self.device, layers=len(self.measured), top=top, keep=keep
        )
        self.generations = {
            stack: GenerationTracker(base, self.catch_up)
            for stack, base in found.base_models.items()
        }
        self.seen: dict[str, set[Site]] = {}
        """Sites seen in the passes under way, by stack; none between passes (and while gradient
        checkpointing runs layers a second time)."""
        self.begun: set[str] = set()
        """Stacks whose pass under way has shown its first attention."""
        self.first: dict[CallSpec, tuple[SiteQueue | None, CompletionSpan, int]] = {}
        """Of the pass under way, by what others say too: the lane of a call that waits, or None
        where it does not count; whose words; and the bytes that such a call holds."""
        self.tail: PassQueue | None = None
        """Calls of the pass under way that wait to be measured with the first of them."""
        self.frames: list[Geometry] = []
        """Those of the passes under way."""
        self.waiting: dict[Site, SiteQueue] = {}
        """What is not measured yet."""
        self.hold = hold
        """The share of free memory that they may hold."""
        self.room: int | None = None
        self.held = 0
        self.cache: dict[str, Any] = {}
        """The cache of the pass under way, by stack."""
        self.guarded: Any = None
        """The cache under way; only one, or a long loop would keep them all."""
        for scope in parts.values():
            scope._unread = self.catch_up

    def begin(self, stack: str, cache: Any) -> None:
        """A forward pass of a stack begins."""
        self.seen[stack] = set()
        self.begun.discard(stack)
        self.first.clear()
        self._unroll()
        self.cache[stack] = cache
        self.generations[stack].begin_pass()
        for scope in self._of(stack):
            scope._begun, scope._complete = True, False
            scope._early.clear()
        self.reducer.rewritten = rewritten(cache)
        self._guard(cache)

    def wants(self, site: Site) -> bool:
        """Whether this site is measured, now."""
        if site.stack not in self.seen:
            return False
        if site in self.seen[site.stack]:
            raise ModelError(
                f"layer {site.layer} calls its attention function more than once in one forward "
                "pass, with other queries or keys (once for each image, or layers that share a "
                "module), so these calls cannot be assigned; pass one image or text at a time",
                code="repeated-attention",
                layer=site.layer,
            )
        self.seen[site.stack].add(site)
        return site in self.measured

    def on_call(self, seen: CapturedCall) -> None:
        """Add one attention to the sums, now or with others."""
        if seen.geometry is not None and seen.geometry.device.type in WITHOUT_FLOAT64:
            seen = on_cpu(seen)
        assert seen.geometry is not None
        site, frame = seen.site, seen.geometry
        if not self.frames or self.frames[-1] is not frame:
            self.frames.append(frame)
        can_wait = seen.lse is not None and not seen.changed and self.hold > 0
        lane = self.waiting.get(site)
        if lane is not None and can_wait and site.stack in self.begun:
            self._wait(lane, seen)  # a further step, like those before it
            return
        reply = self.generations[site.stack].span(frame.first_query, frame.queries)
        step = frame.queries == 1 and frame.first_query >= reply.start
        if site.stack not in self.begun:
            self.begun.add(site.stack)
            self._make_way(site.stack, frame, step=step)
            for scope in self._of(site.stack):
                if frame.first_query == 0:
                    scope._fed = []
                given = hooks.last_pass(self.bases[site.stack])
                scope._fed.append(given.tokens)
                scope._padding = given.padding
        elif lane is not None:
            self.measure_waiting()
        scope = self.parts[site.part]
        if seen.spec is not None and can_wait and self._leads(scope, seen, seen.spec, reply):
            return
        totals = self._follow(scope, site.layer, frame, reply)
        if seen.weights is not None:
            self.reducer.reduce_weights(scope, seen.weights, frame, totals, reply, sinks=seen.sinks)
            return
        assert seen.call is not None
        if scope._queries.counts_none(frame, reply):
            if seen.spec is not None and can_wait:
                self.first[seen.spec] = None, reply, 0
            return
        if not can_wait or large(seen.call):
            self.reducer.reduce(
                [SiteQueue(site=site, call=seen.call, reply=reply, steps=step)],
                frame,
                seen.call.q,
                seen.call.k,
                seen.lse,
            )
            if frame.first_query == 0:  # nothing of this layer is still to come in this pass
                scope._early.add(site.layer)
                scope._checked = False
            return
        lane = self.waiting.get(site)
        if lane is None:
            lane = SiteQueue(site=site, call=bare(seen.call), reply=reply, steps=step)
        self._wait(lane, seen)

    def needs_tensors(self, sites: Collection[Site]) -> list[bool]:
        """Which of these are measured."""
        if self.everything:
            return [True] * len(sites)
        return [site in self.measured for site in sites]

    def queue_limit(self, site: Site, terms: CallSpec) -> tuple[int, bool]:
        """Of how many calls that say what this site's said it can be told later, and whether any
        of them counts."""
        lane, told = self.waiting.get(site), self.first.get(terms)
        if self.hold == 0 or terms.geometry.device.type in WITHOUT_FLOAT64:
            return 0, True
        if lane is not None and lane.steps:
            for other in self.waiting.values() if len(lane.frames) > 1 else ():
                if other.frames[-1] is lane.frames[-2]:
                    cache = self.cache.get(other.site.stack)
                    other.expect(terms.geometry, cached_keys(cache, other.site.layer))
            return sys.maxsize, True
        if told is None:
            return 0, True
        if told[0] is None:
            return sys.maxsize, False
        each, most = told[2], LITTLE
        if self.held + each * len(self.measured) > LITTLE:
            most = max(most, self._room())
        return max(0, most - self.held) // each, True

    def on_deferred_calls(self, terms: CallSpec, calls: list[DeferredCall]) -> None:
        """Calls that differ from one of this pass by their tensors alone wait too, or do not count
        either."""
        self.seen[calls[0][0].stack].update([call[0] for call in calls])
        measured = calls
        if not self.everything:
            measured = [call for call in calls if call[0] in self.measured]
        tail = self.tail
        if tail is not None and tail.terms is terms:
            tail.calls += measured  # type: ignore[arg-type]
            self.held += tail.each * len(measured)
            # Before it is too much: what lies together may be a copy, as large again.
            if self.held + tail.each > LITTLE and not self._has_room(self.held + tail.each):
                self.measure_waiting()
            return
        frame, (like, reply, each) = terms.geometry, self.first[terms]
        keys = frame.keys
        for site, q, k, lse in measured:
            lane = self.waiting.get(site)
            if lane is None:
                self._follow(self.parts[site.part], site.layer, frame, reply)
                if like is None:
                    continue
                lane = SiteQueue(site=site, call=like.call, reply=reply, steps=like.steps)
                self.waiting[site] = lane
            assert q is not None
            assert k is not None
            assert lse is not None
            k = k if keys == k.shape[2] else k[:, :, :keys]
            self.held += lane.add(frame, q, k, lse, each)

    def _leads(
        self, scope: Scope, seen: CapturedCall, terms: CallSpec, reply: CompletionSpan
    ) -> bool:
        """Let a call wait that may be the first of a whole pass whose layers are measured without
        telling them apart; False where it cannot be."""
        frame, call = terms.geometry, seen.call
        if (
            self.waiting
            or self.apart
            or terms.attend is None  # others will be told one by one
            or len(self.parts) > 1
            or frame.first_query
            or frame.first_key
            or frame.keys != terms.shapes[1][2]  # a static cache hands over more than there are
            or call is None
            or seen.lse is None
            or large(call)
            or scope._queries.counts_none(frame, reply)
        ):
            return False
        lane = SiteQueue(site=seen.site, call=bare(call), reply=reply, steps=False)
        held = lane.add(frame, call.q, call.k, seen.lse)
        if not self._has_room(held):
            return False
        self.waiting[seen.site] = lane
        self.held = held
        self.first[terms] = lane, reply, held
        self.tail = PassQueue(terms=terms, first=lane)
        return True

    def _unroll(self) -> None:
        """Make lanes of calls that were to be measured together."""
        tail, self.tail = self.tail, None
        if tail is None:
            return
        like, terms = tail.first, tail.terms
        scope = self.parts[like.site.part]
        if like.site.layer not in scope._layers:
            self._follow(scope, like.site.layer, terms.geometry, like.reply)
        for site, q, k, lse in tail.calls:
            self._follow(scope, site.layer, terms.geometry, like.reply)
            lane = SiteQueue(site=site, call=like.call, reply=like.reply, steps=False)
            lane.add(terms.geometry, q, k, lse)
            self.waiting[site] = lane

    def _wait(self, lane: SiteQueue, seen: CapturedCall) -> None:
        assert seen.geometry is not None
        assert seen.call is not None
        assert seen.lse is not None
        self.waiting[lane.site] = lane
        each = lane.add(seen.geometry, seen.call.q, seen.call.k, seen.lse)
        self.held += each
        if seen.spec is not None:
            self.first[seen.spec] = lane, lane.reply, each
        if not lane.steps and not self._has_room(self.held):
            self.measure_waiting()

    def _make_way(self, stack: str, frame: Geometry, *, step: bool) -> None:
        """A pass begins. What waits is joined by a further step of the same reply, measured before
        anything else of the same text, and forgotten before a new one."""
        if frame.first_query == 0:
            self._forget(stack)
            for scope in self._of(stack):
                scope._forget()
        elif not (step and all(lane.steps for lane in self.waiting.values())):
            self.measure_waiting()

    def end(self, stack: str, *, finished: bool) -> None:
        """The pass is over, or broke off: then there is nothing to read."""
        seen, cache = self.seen.pop(stack, set()), self.cache.pop(stack, None)
        for scope in self._of(stack):
            scope._early.clear()
        if not finished:
            self._forget(stack)
            return
        if not seen:
            raise ModelError(
                "the model ran without a single attention that attnscope can see. Models without "
                "attention have no attention to measure; in code of your own, let the forward of "
                "the attention modules call ALL_ATTENTION_FUNCTIONS.get_interface",
                code="no-attention",
            )
        for scope in self._of(stack):
            scope._complete, scope._checked = True, False
        for lane in self.waiting.values():
            lane.restore()
        if self.waiting and (
            self.tail is not None or not (self._lasts(cache) and self._has_room(self.held))
        ):
            self.measure_waiting()
        for frame in self.frames:  # what kernels kept from layer to layer
            frame.let_go()
        self.frames.clear()

    def _forget(self, stack: str) -> None:
        self.tail = None
        self.waiting = {site: lane for site, lane in self.waiting.items() if site.stack != stack}
        self.held = sum(lane.held for lane in self.waiting.values())

    def _lasts(self, cache: Any) -> bool:
        """Whether all that waits may wait beyond this pass: steps whose keys come back."""
        inside = any(generation.call is not None for generation in self.generations.values())
        return all(
            lane.steps
            and site.kind == "self"
            # Looked at once: how a model treats its cache does not change between steps.
            and (
                len(lane.frames) > 1
                or lasting(cache, site.layer, lane.pieces[-1][1], inside=inside)
            )
            for site, lane in self.waiting.items()
        )

    def _has_room(self, size: int) -> bool:
        """Whether so many bytes may be held; of a few nobody needs to ask."""
        if size <= LITTLE and self.hold > 0:
            return True
        return size <= self._room()

    def _room(self) -> int:
        if self.room is None:
            self.room = int(self.hold * free_memory(self.device))
        return self.room

    def catch_up(self) -> None:
        """Measure what waits. That it adds up is made sure of at once where that takes no waiting
        for a device, and else before the first number is read."""
        self.measure_waiting()
        for scope in self.parts.values():
            scope._dtype = self.reducer.dtype
            if not scope._checked and self.device.type == "cpu":
                scope._verify()

    def finish(self) -> None:
        """The watch is over."""
        try:
            self.catch_up()
        finally:
            self.release_cache()
            for scope in self.parts.values():
                scope._unread = None

    def measure_waiting(self) -> None:
        """Measure what waits, those that are alike together."""
        if self._measure_jointly():
            return
        self._unroll()
        lanes, self.waiting, self.held = list(self.waiting.values()), {}, 0
        for lane in lanes:
            lane.restore()
        for group in alike(lanes):
            self._measure_alike(group)

    def _measure_jointly(self) -> bool:
        """Measure a whole pass that waits, if all of it is alike; its layers are told apart when
        somebody asks for one."""
        tail, scope = self.tail, next(iter(self.parts.values()))
        if tail is None or len(self.waiting) != 1:
            return False
        if not (self.reducer.in_place(tail.first.q[0]) or self._has_room(tail.size)):
            return False
        first, frame = tail.first, tail.terms.geometry
        selection = self.reducer.select(scope, frame, first.reply)
        layers = [first.site.layer, *(site.layer for site, *_ in tail.calls)]
        if selection is None or selection.sampled:
            return False
        self.tail, self.waiting, self.held = None, {}, 0
        self.reducer.dtype = first.q[0].dtype
        sums = self.reducer.of_layers(scope, tail, selection)
        sums.lse = None  # as large as all the rest: let it go
        scope._apart.pop(layers[0], None)  # which had nothing in it yet
        scope._joints.append(
            StackedSums(
                layers=layers,
                sums=sums,
                selection=selection,
                turn=first.reply.turn,
                continued=first.reply.call is not None,
                tentative=scope._queries.tentative(frame, first.reply),
            )
        )
        return True

    def _of(self, stack: str) -> list[Scope]:
        """The scopes that a pass of this stack fills."""
        return [scope for scope in self.parts.values() if scope._stack == stack]

    def _guard(self, cache: Any) -> None:
        if cache is not self.guarded:
            self.release_cache()
            self.guarded = cache
            guard_cache(cache, self)

    def release_cache(self) -> None:
        """Give the watched cache its own methods back."""
        unguard_cache(self.guarded, self)
        self.guarded = None

    def _follow(
        self, scope: Scope, layer: int, frame: Geometry, reply: CompletionSpan
    ) -> LayerAccumulator:
        """The sums of a layer, for a pass that continues them or begins a new sequence."""
        if frame.first_query == 0:
            scope._layers[layer] = LayerAccumulator(
                first=frame.first_real, begun=frame.begun, turn=reply.turn
            )
        elif layer not in scope._layers:
            raise ScopeError(
                "this forward pass continues a KV cache that was filled before the with block; "
                "run the whole sequence inside the block",
                code="cache-from-before",
            )
        totals = scope._layers[layer]
        if frame.first_query > 0:
            totals.pay()
            totals.follow(frame)
        totals.continued |= frame.first_query > 0 or reply.call is not None
        totals.position = frame.first_query + frame.queries
        totals.keys = frame.first_key + frame.keys
        if totals.turn != reply.turn and scope._queries.name == "predicts":
            totals.settle()
        totals.turn = reply.turn
        return totals

    def _measure_alike(self, lanes: list[SiteQueue]) -> None:
        """Measure lanes that are alike, as many at once as there is room for."""
        step, size = len(lanes), max(lane.size for lane in lanes)
        while step > 1 and not self._has_room(step * size):
            step = even(len(lanes), step - 1)
        frame = join(lanes[0].frames)
        for at in range(0, len(lanes), step):
            some = lanes[at : at + step]
            self.reducer.reduce(some, frame, *together(some))
        frame.let_go()
