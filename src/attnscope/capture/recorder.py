"""One watch at work: an observer of a model's attention that keeps the sums."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnscope import kernels
from attnscope.capture import fallback, seam, sites
from attnscope.capture.conservation import check
from attnscope.capture.frame import Frame, Part, Selection, join
from attnscope.capture.generation import Generation, Reply
from attnscope.capture.kept import keep, keep_weights, rewritten
from attnscope.capture.passes import Terms
from attnscope.capture.queries import select
from attnscope.capture.rows import positions, rows_of
from attnscope.capture.scope import Scope
from attnscope.capture.seam import Seen
from attnscope.capture.sites import Site
from attnscope.capture.totals import Joint, LayerTotals, by_lane, split
from attnscope.capture.waiting import (
    Lane,
    Tail,
    alike,
    free_memory,
    large,
    lasting,
    terms,
    together,
)
from attnscope.errors import ConservationError, ModelError, ScopeError
from attnscope.kernels import AttentionCall
from attnscope.kernels.call import reach_of
from attnscope.kernels.pieces import even

__all__ = ["Recorder", "device_of"]

# Bytes that may wait anywhere: asking the device how many it has free takes longer than a launch.
LITTLE = 64 << 20
# Rows of a sampled pass that are looked at whole, to check the log-sum-exp they were given.
AUDITED = 4
# The share of free memory that queries and keys may take which are kept beyond their pass.
KEEP = 0.5


def device_of(found: sites.Sites) -> torch.device:
    """Where the first attention layer computes."""
    module = min(found.modules, key=found.modules.__getitem__)
    hook = getattr(module, "_hf_hook", None)  # weights that accelerate keeps elsewhere
    device = getattr(hook, "execution_device", None)
    if device is not None:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return next(module.parameters()).device


class Recorder:
    """One watch at work: observes the attention of a model and keeps its scopes up to date."""

    describes = True

    def __init__(
        self,
        found: sites.Sites,
        parts: dict[str, Scope],
        backend: str,
        *,
        top: int,
        keep: bool,
        hold: float,
    ):
        self.parts = parts
        """By part: a stack, or "cross"."""
        self.measured = {
            site
            for site in found.places
            if site.part in parts and site.layer in parts[site.part].layers
        }
        self.bases = found.bases
        self.backend = backend
        self.device = device_of(found)
        self.top = top
        self.keep = keep
        self.keep_room: int | None = None
        self.rewritten = True
        """Whether the keys of the pass under way may be written over."""
        self.generations = {
            stack: Generation(base, self.catch_up) for stack, base in found.bases.items()
        }
        self.seen: dict[str, set[Site]] = {}
        """Sites seen in the passes under way, by stack; none between passes (and while gradient
        checkpointing runs layers a second time)."""
        self.begun: set[str] = set()
        """Stacks whose pass under way has shown its first attention."""
        self.first: dict[str, tuple[Terms, Lane | None, Reply]] = {}
        """By part, of the pass under way: a call that waits, or does not count (None), for others
        that say the same."""
        self.tail: Tail | None = None
        """Calls of the pass under way that wait to be measured with the first of them."""
        self.frames: list[Frame] = []
        """Those of the passes under way."""
        self.waiting: dict[Site, Lane] = {}
        """What is not measured yet."""
        self.hold = hold
        """The share of free memory that they may hold."""
        self.room: int | None = None
        self.held = 0
        self.cache: dict[str, Any] = {}
        """The cache of the pass under way, by stack."""
        self.dtype = torch.float32
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
            scope._complete = False
        self.rewritten = rewritten(cache)
        self._guard(cache)

    def wants(self, site: Site) -> bool:
        """Whether this site is measured, now."""
        if site.stack not in self.seen:
            return False
        if site in self.seen[site.stack]:
            raise ModelError(
                f"layer {site.layer} attends twice in one forward pass (layers that share a "
                "module), so its numbers cannot be told apart"
            )
        self.seen[site.stack].add(site)
        return site in self.measured

    def see(self, seen: Seen) -> None:
        """Add one attention to the sums, now or with others."""
        assert seen.frame is not None
        site, frame = seen.site, seen.frame
        can_wait = seen.lse is not None and not seen.changed and self.hold > 0
        lane = self.waiting.get(site)
        if lane is not None and can_wait and site.stack in self.begun:
            self._wait(lane, seen)  # a further step, like those before it
            return
        reply = self.generations[site.stack].reply(frame.first_query, frame.queries)
        step = frame.queries == 1 and frame.first_query >= reply.start
        if site.stack not in self.begun:
            self.begun.add(site.stack)
            self._make_way(site.stack, frame, step=step)
            for scope in self._of(site.stack):
                if frame.first_query == 0:
                    scope._fed = []
                scope._fed.append(seam.given(self.bases[site.stack]).tokens)
        elif lane is not None:
            self.measure_waiting()
        if not self.frames or self.frames[-1] is not frame:
            self.frames.append(frame)
        scope = self.parts[site.part]
        totals = self._follow(scope, site.layer, frame, reply)
        if seen.weights is not None:
            self._measure_weights(scope, seen.weights, frame, totals, reply, sinks=seen.sinks)
            return
        assert seen.call is not None
        if scope._queries.counts_none(frame, reply):
            if seen.terms is not None and can_wait:
                self.first[site.part] = seen.terms, None, reply
            return
        if not can_wait or large(seen.call):
            self._measure(
                [Lane(site=site, call=seen.call, reply=reply, steps=step)],
                frame,
                seen.call.q,
                seen.call.k,
                seen.lse,
            )
            return
        lane = self.waiting.get(site)
        if lane is None:
            lane = Lane(site=site, call=terms(seen.call), reply=reply, steps=step)
            if seen.terms is not None:
                self.first[site.part] = seen.terms, lane, reply
        self._wait(lane, seen)
        if seen.terms is not None and self._joins(lane, seen.terms):
            self.tail = Tail(terms=seen.terms, first=lane, seen=self.seen[site.stack])

    def see_alike(
        self, site: Site, terms: Terms, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None
    ) -> None:
        """An attention that differs from one of this pass by its tensors alone waits too, or does
        not count either."""
        tail = self.tail
        if tail is not None and tail.terms is terms and lse is not None and site in self.measured:
            tail.seen.add(site)
            tail.add(site, q, k, lse)
            self.held += tail.each
            if self.held > LITTLE and not self._has_room(self.held):
                self.measure_waiting()
            return
        if not self.wants(site):
            return
        frame = terms.frame
        keys = frame.keys
        k = k if keys == k.shape[2] else k[:, :, :keys]
        if lse is not None and self.hold > 0:
            lane = self.waiting.get(site)
            if lane is not None and site.stack in self.begun:
                self.held += lane.add(frame, q, k, lse)
                return
            told = self.first.get(site.part)
            if lane is None and told is not None and told[0] is terms:
                _, like, reply = told
                if like is None:
                    self._follow(self.parts[site.part], site.layer, frame, reply)
                    return
                lane = Lane(site=site, call=like.call, reply=reply, steps=like.steps)
                self.waiting[site] = lane
                self.held += lane.add(frame, q, k, lse)
                if self._joins(lane, terms):
                    self.tail = Tail(terms=terms, first=lane, seen=self.seen[site.stack])
                else:
                    self._follow(self.parts[site.part], site.layer, frame, reply)
                if not lane.steps and not self._has_room(self.held):
                    self.measure_waiting()
                return
        self.see(_seen(site, terms, q, k, v if keys == v.shape[2] else v[:, :, :keys], lse))

    def _joins(self, lane: Lane, terms: Terms) -> bool:
        """Whether a lane that waits alone is of a whole pass whose layers can be measured without
        telling them apart."""
        frame = terms.frame
        return (
            self.tail is None
            and self.waiting == {lane.site: lane}
            and len(self.parts) == 1
            and not (self.top or self.keep or lane.steps)
            and frame.first_query == frame.first_key == 0
            and frame.keys == terms.shapes[1][2]  # a static cache hands over more than there are
        )

    def _unroll(self) -> None:
        """Make lanes of calls that were to be measured together."""
        tail, self.tail = self.tail, None
        if tail is None:
            return
        like, terms = tail.first, tail.terms
        scope = self.parts[like.site.part]
        if like.site.layer not in scope._layers:
            self._follow(scope, like.site.layer, terms.frame, like.reply)
        for site, q, k, lse in tail.calls:
            self._follow(scope, site.layer, terms.frame, like.reply)
            lane = Lane(site=site, call=like.call, reply=like.reply, steps=False)
            lane.add(terms.frame, q, k, lse)
            self.waiting[site] = lane

    def _wait(self, lane: Lane, seen: Seen) -> None:
        assert seen.frame is not None
        assert seen.call is not None
        assert seen.lse is not None
        self.waiting[lane.site] = lane
        self.held += lane.add(seen.frame, seen.call.q, seen.call.k, seen.lse)
        if not lane.steps and not self._has_room(self.held):
            self.measure_waiting()

    def _make_way(self, stack: str, frame: Frame, *, step: bool) -> None:
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
        if not finished:
            self._forget(stack)
            return
        if not seen:
            raise ModelError(
                "the model ran without a single attention that attnscope can see; models without "
                "attention have no attention to measure"
            )
        for scope in self._of(stack):
            scope._complete, scope._checked = True, False
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
        if self.room is None:
            self.room = int(self.hold * free_memory(self.device))
        return size <= self.room

    def catch_up(self) -> None:
        """Measure what waits, and make sure that it adds up."""
        self.measure_waiting()
        for scope in self.parts.values():
            if scope._checked:
                continue
            try:
                scope._check(self.dtype)
            except (ConservationError, ModelError):
                scope._forget()
                raise
            scope._checked = True

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
        for group in alike(lanes):
            self._measure_alike(group)

    def _measure_jointly(self) -> bool:
        """Measure a whole pass that waits, if all of it is alike; its layers are told apart when
        somebody asks for one."""
        tail, scope = self.tail, next(iter(self.parts.values()))
        if tail is None or len(self.waiting) != 1 or not self._has_room(self.held + tail.size):
            return False
        first, frame = tail.first, tail.terms.frame
        selection = self._select(scope, frame, first.reply)
        layers = [first.site.layer, *(site.layer for site, *_ in tail.calls)]
        if selection is None or selection.sampled:
            return False
        self.tail, self.waiting, self.held = None, {}, 0
        q, k, lse = tail.together()
        self.dtype = q.dtype
        call, L = replace(first.call, q=q, k=k), len(layers)
        rows = rows_of(call, selection.whole.times(L), lse, scope._groups, L)
        sums = kernels.kernel(self._backend(q))(rows)
        sums.lse = None  # as large as all the rest: let it go
        scope._apart.pop(layers[0], None)  # which had nothing in it yet
        scope._joints.append(
            Joint(
                layers=layers,
                sums=sums,
                selection=selection,
                turn=first.reply.turn,
                continued=first.reply.call is not None,
                tentative=scope._queries.tentative(frame, first.reply),
            )
        )
        return True

    def _backend(self, q: Tensor) -> str:
        """The kernel for these queries: one layer of a model spread over devices may lie
        elsewhere."""
        elsewhere = self.backend == "triton" and q.device.type != self.device.type
        return "streaming" if elsewhere else self.backend

    def _of(self, stack: str) -> list[Scope]:
        """The scopes that a pass of this stack fills."""
        return [scope for scope in self.parts.values() if scope._stack == stack]

    def _guard(self, cache: Any) -> None:
        if cache is not self.guarded:
            self.release_cache()
            self.guarded = cache
            _guard(cache, self)

    def release_cache(self) -> None:
        """Give the watched cache its own methods back."""
        _release(self.guarded, self)
        self.guarded = None

    def _follow(self, scope: Scope, layer: int, frame: Frame, reply: Reply) -> LayerTotals:
        """The sums of a layer, for a pass that continues them or begins a new sequence."""
        if frame.first_query == 0:
            scope._layers[layer] = LayerTotals(
                first=frame.first_real, begun=frame.begun, turn=reply.turn
            )
        elif layer not in scope._layers:
            raise ScopeError(
                "this forward pass continues a cache that was filled before the with block; "
                "run the whole sequence inside it"
            )
        totals = scope._layers[layer]
        if frame.first_query > 0:
            totals.follow(frame)
        totals.continued |= frame.first_query > 0 or reply.call is not None
        totals.position = frame.first_query + frame.queries
        totals.keys = frame.first_key + frame.keys
        if totals.turn != reply.turn and scope._queries.name == "predicts":
            totals.settle()
        totals.turn = reply.turn
        return totals

    def _select(self, scope: Scope, frame: Frame, reply: Reply) -> Selection | None:
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
        totals: LayerTotals,
        frame: Frame,
        reply: Reply,
        selection: Selection | None,
    ) -> LayerTotals:
        """The sums to add the counted rows of a frame to."""
        if selection is None or not scope._queries.tentative(frame, reply):
            return totals
        if totals.tentative is None:
            totals.tentative = LayerTotals(first=totals.first)
            return totals.tentative
        again = selection.count > 0
        if bool(again.all()):
            totals.tentative = LayerTotals(first=totals.first)
        else:
            totals.tentative.drop(again)
        return totals.tentative

    def _measure_weights(
        self,
        scope: Scope,
        A: Tensor,
        frame: Frame,
        totals: LayerTotals,
        reply: Reply,
        *,
        sinks: bool,
    ) -> None:
        """The fallback: a layer's whole matrix, reduced before the next layer runs."""
        self.dtype = A.dtype
        scope.backend = "eager-fallback"
        selection = self._select(scope, frame, reply)
        sums = self._target(scope, totals, frame, reply, selection)
        if selection is not None:
            A = fallback.reduce(A, frame, selection, sums, scope._groups, self.top, has_sinks=sinks)
            if self.keep:
                kept, more = keep_weights(A, positions(selection).to(A.device))
                sums.kept.append(kept)
                self._bounded(sums, more)

    def _measure_alike(self, lanes: list[Lane]) -> None:
        """Measure lanes that are alike, as many at once as there is room for."""
        step, size = len(lanes), max(lane.size for lane in lanes)
        while step > 1 and not self._has_room(step * size):
            step = even(len(lanes), step - 1)
        frame = join(lanes[0].frames)
        for at in range(0, len(lanes), step):
            some = lanes[at : at + step]
            self._measure(some, frame, *together(some))
        frame.let_go()

    def _measure(
        self, lanes: list[Lane], frame: Frame, q: Tensor, k: Tensor, lse: Tensor | None
    ) -> None:
        """Reduce the rows of lanes that are alike: [L · B, …], lane by lane."""
        first, L = lanes[0], len(lanes)
        scope = self.parts[first.site.part]
        targets = []
        selection = self._select(scope, frame, first.reply)
        for lane in lanes:
            totals = scope._layers[lane.site.layer]
            totals.position = max(totals.position, frame.first_query + frame.queries)
            totals.keys = max(totals.keys, frame.first_key + frame.keys)
            targets.append(self._target(scope, totals, frame, lane.reply, selection))
        if selection is None:
            return
        self.dtype = q.dtype
        backend = self._backend(q)
        reduce = kernels.kernel(backend)
        call = replace(first.call, q=q, k=k)
        if len(first.frames) > 1:
            call = replace(call, visible=frame.visible)
        groups = scope._groups
        if selection.sampled:  # every part needs the log-sum-exp of whole rows
            lse, drift = _whole_rows(call, frame, lse, backend, L)
            _audit(lanes, call, frame, lse, backend)
            for totals, own_drift in zip(targets, by_lane(drift, L), strict=True):
                totals.drifted(own_drift)
        for part in selection.parts:
            sums = reduce(rows_of(call, part.times(L), lse, groups, L))
            for totals, own in zip(targets, split(sums, L), strict=True):
                totals.add(own, frame.first_key)
        for totals in targets:
            totals.selections.append(selection)
            totals.sampled |= selection.sampled
        if self.keep:
            self._keep(targets, selection, call)
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
            told = kernels.tell_rows(backend)(rows, kernels.Asked(top=self.top))
            keys, weights = told.top_key, told.top_weight
            assert keys is not None
            assert weights is not None
            where = positions(selection).to(keys.device)
            keys = keys.where(keys < 0, keys + frame.first_key)
            found = zip(by_lane(keys, L), by_lane(weights, L), strict=True)
            for totals, (at, heavy) in zip(targets, found, strict=True):
                totals.top.append((where, at, heavy))

    def _keep(self, totals: list[LayerTotals], selection: Selection, call: AttentionCall) -> None:
        """Keep the rows of L lanes that are alike, [L · B, …] as in `call`."""
        frame, L = selection.frame, len(totals)
        where = positions(selection).to(call.q.device)
        seen = int(frame.intervals[1].max())
        for sums, q, k in zip(totals, by_lane(call.q, L), by_lane(call.k, L), strict=True):
            rows = rows_of(replace(call, q=q, k=k), selection.whole, None, 0)
            kept, more = keep(
                sums.kept, rows, where, frame.first_key, seen, copy=self.rewritten and L == 1
            )
            sums.kept.append(kept)
            self._bounded(sums, more)

    def _bounded(self, totals: LayerTotals, more: int) -> None:
        """Refuse to keep more than there is room for, as soon as that can be told."""
        if self.keep_room is None:
            self.keep_room = int(KEEP * free_memory(self.device))
        totals.held += more
        layers = len(self.measured)
        held = sum(each.held for part in self.parts.values() for each in part._layers.values())
        if (need := max(held, totals.held * layers)) > self.keep_room:
            raise ScopeError(
                f"keep=True: queries and keys of {layers} layers come to {need / 2**30:.2f} GiB so "
                f"far, and {self.keep_room / 2**30:.2f} GiB may be held, half of what was free; "
                "measure fewer layers (layers=[…]) or fewer queries (queries='last', or a mask)"
            )


def _seen(site: Site, terms: Terms, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None) -> Seen:
    """An attention as the terms of its call tell it."""
    frame = terms.frame
    call = AttentionCall(
        layer=site.layer,
        q=q,
        k=k,
        v=v,
        scale=terms.scale,
        visible=frame.visible,
        softcap=terms.softcap,
        first=frame.first_query - frame.first_key,
    )
    return Seen(site=site, values=v, frame=frame, call=call, lse=lse, terms=terms)


# A cache whose rows are shuffled (beam search) or cut (assisted generation) between steps no longer
# matches the sums so far. Never a wrong number: say so at once.
_SHUFFLES = ("reorder_cache", "crop", "batch_select_indices", "batch_repeat_interleave")
_guards: dict[int, set[Recorder]] = {}
"""Who guards a cache, by its id: several watches may, and leave in any order."""


def _guard(cache: Any, who: Recorder) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ScopeError(
            "the cache was reordered or cut while watched, so attention can no longer be "
            "added up by sequence; generate with num_beams=1 and without an assistant model"
        )

    if cache is None:
        return
    _guards.setdefault(id(cache), set()).add(who)
    for method in _SHUFFLES:
        if hasattr(cache, method):
            setattr(cache, method, refuse)


def _release(cache: Any, who: Recorder) -> None:
    left = _guards.get(id(cache), set())
    left.discard(who)
    if cache is not None and not left:
        _guards.pop(id(cache), None)
        for method in _SHUFFLES:
            vars(cache).pop(method, None)


def _whole_rows(
    call: AttentionCall, frame: Frame, lse: Tensor | None, backend: str, times: int
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of all queries in float64, and how far the given one was from it."""
    causal = frame.form == "causal"
    everything = Part(
        rows=frame.queries,
        causal=causal,
        start=None if causal else frame.visible.start,
        stop=None if causal else frame.visible.stop,
        own=frame.own().int().expand(frame.batch, -1).contiguous().to(call.q.device),
    )
    rows = rows_of(call, everything.times(times), lse, 0, times)
    if rows.lse is not None:
        return kernels.refine(backend)(rows)
    known = kernels.kernel(backend)(rows).lse
    assert known is not None
    return known.double(), torch.zeros(known.shape[:2], device=known.device)


def _audit(lanes: list[Lane], call: AttentionCall, frame: Frame, lse: Tensor, backend: str) -> None:
    """A few rows, looked at whole: do they add up to 1 under the log-sum-exp that parts get?"""
    L = len(lanes)
    index = torch.linspace(0, frame.queries - 1, AUDITED).long().expand(frame.batch, -1)
    start, stop = (bound.gather(1, index).int().to(lse.device) for bound in frame.intervals)
    own = frame.own()[index].int().to(lse.device)
    few = Part(rows=AUDITED, index=index.to(lse.device), start=start, stop=stop, own=own).times(L)
    rows = rows_of(call, few, lse, 0, L)
    sums = kernels.kernel(backend)(rows)
    assert rows.lse is not None
    sees = (stop > start).repeat(L, 1)[:, None]
    mass = sums.mass.double()
    if rows.sinks is not None:
        mass += (torch.exp(rows.sinks.double()[:, None] - rows.lse) * sees).sum(-1)
    off = (mass - sees.sum(-1)).abs() / AUDITED
    reach = sums.reach
    if reach is None:
        reach = reach_of(rows).repeat_interleave(rows.q.shape[1] // rows.k.shape[1], 1)
    check(
        [lane.site.layer for lane in lanes],
        torch.stack(by_lane(off, L)),
        torch.stack(by_lane(reach, L)),
        call.q.dtype,
        "rows looked at whole add up to 1 only within",
    )
