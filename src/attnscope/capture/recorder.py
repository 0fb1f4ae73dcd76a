"""One watch at work: an observer of a model's attention that keeps the sums."""

from typing import Any

import torch
from torch import Tensor

from attnscope import kernels
from attnscope.capture import fallback, sites
from attnscope.capture.frame import Frame, Part, Selection
from attnscope.capture.generation import Generation
from attnscope.capture.queries import select
from attnscope.capture.scope import Scope
from attnscope.capture.seam import Seen
from attnscope.capture.sites import Site
from attnscope.capture.totals import LayerTotals
from attnscope.errors import ConservationError, ModelError, ScopeError
from attnscope.kernels import AttentionCall, Rows
from attnscope.kernels.top import top_keys

__all__ = ["Recorder", "device_of"]

# Rows of a sampled pass that are looked at whole, to check the log-sum-exp they were given.
AUDITED = 4


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

    def __init__(self, found: sites.Sites, parts: dict[str, Scope], backend: str, top: int):
        self.parts = parts
        """By part: a stack, or "cross"."""
        self.backend = backend
        self.device = device_of(found)
        self.top = top
        self.generations = {stack: Generation(base) for stack, base in found.bases.items()}
        self.seen: dict[str, set[Site]] = {}
        """Sites seen in the passes under way, by stack; none between passes (and while gradient
        checkpointing runs layers a second time)."""
        self.dtype = torch.float32
        self.guarded: Any = None
        """The cache under way; only one, or a long loop would keep them all."""

    def begin(self, stack: str, cache: Any) -> None:
        """A forward pass of a stack begins."""
        self.seen[stack] = set()
        self.generations[stack].begin_pass()
        for scope in self._of(stack):
            scope._complete = False
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
        return site.part in self.parts and site.layer in self.parts[site.part].layers

    def see(self, seen: Seen) -> None:
        """Add one attention to the sums."""
        assert seen.frame is not None
        scope = self.parts[seen.site.part]
        selection, totals = self._select(scope, seen.site.layer, seen.frame)
        if selection is None:
            return
        if seen.weights is not None:
            self.dtype = seen.weights.dtype
            scope.backend = "eager-fallback"
            fallback.reduce(
                seen.weights,
                seen.frame,
                selection,
                totals,
                scope._groups,
                self.top,
                has_sinks=seen.sinks,
            )
            return
        assert seen.call is not None
        self._measure(scope, seen.call, seen.frame, selection, totals, seen.lse)

    def end(self, stack: str, *, finished: bool) -> None:
        """The pass is over, or broke off: then there is nothing to read."""
        seen = self.seen.pop(stack, set())
        if not finished:
            return
        if not seen:
            raise ModelError(
                "the model ran without a single attention that attnscope can see; models without "
                "attention have no attention to measure"
            )
        for scope in self._of(stack):
            for totals in scope._layers.values():
                for part in (totals, totals.tentative):
                    if part is not None and part.selections:
                        part.selections[-1].forget()
            try:
                scope._check(self.dtype)
            except ConservationError:
                scope._layers.clear()
                raise
            scope._complete = True

    def _of(self, stack: str) -> list[Scope]:
        """The scopes that a pass of this stack fills."""
        return [scope for scope in self.parts.values() if scope._stack == stack]

    # A cache whose rows are shuffled (beam search) or cut (assisted generation) between steps no
    # longer matches the sums so far. Never a wrong number: say so at once.
    _SHUFFLES = ("reorder_cache", "crop", "batch_select_indices", "batch_repeat_interleave")

    def _guard(self, cache: Any) -> None:
        if cache is self.guarded:
            return
        self.release_cache()
        self.guarded = cache

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise ScopeError(
                "the cache was reordered or cut while watched, so attention can no longer be "
                "added up by sequence; generate with num_beams=1 and without an assistant model"
            )

        for method in self._SHUFFLES:
            if hasattr(cache, method):
                setattr(cache, method, refuse)

    def release_cache(self) -> None:
        """Give the watched cache its own methods back."""
        for method in self._SHUFFLES if self.guarded is not None else ():
            vars(self.guarded).pop(method, None)
        self.guarded = None

    def _select(
        self, scope: Scope, layer: int, frame: Frame
    ) -> tuple[Selection | None, LayerTotals]:
        """The counted rows of this call, and the sums to add them to; begins a new sequence where
        there is no past."""
        generation = self.generations[scope._stack]
        reply = generation.reply(frame.first_query, frame.queries)
        if frame.first_query == 0:
            scope._layers[layer] = LayerTotals(first=frame.first_real(), turn=reply.turn)
        elif layer not in scope._layers:
            raise ScopeError(
                "this forward pass continues a cache that was filled before the with block; "
                "run the whole sequence inside it"
            )
        totals = scope._layers[layer]
        if frame.first_query > 0:
            _continue(totals, frame)
        totals.continued |= frame.first_query > 0 or generation.inside
        totals.position = frame.first_query + frame.queries
        totals.keys = frame.first_key + frame.keys
        if totals.turn != reply.turn and scope._queries.name == "predicts":
            totals.settle()
        totals.turn = reply.turn
        key = scope._queries, reply
        if key not in frame.selections:
            frame.selections[key] = select(
                scope._queries, frame, reply, scope._classes, scope._groups
            )
        selection = frame.selections[key]
        if selection is None or not scope._queries.tentative(frame, reply):
            return selection, totals
        again = selection.count > 0
        if totals.tentative is None or bool(again.all()):
            totals.tentative = LayerTotals(first=totals.first)
        else:
            totals.tentative.drop(again)
        return selection, totals.tentative

    def _measure(
        self,
        scope: Scope,
        call: AttentionCall,
        frame: Frame,
        selection: Selection,
        totals: LayerTotals,
        lse: Tensor | None,
    ) -> None:
        self.dtype = call.q.dtype
        backend = self.backend
        if backend == "triton" and call.q.device.type != self.device.type:
            backend = "streaming"  # a layer of a model spread over devices
        reduce = kernels.kernel(backend)
        if selection.sampled and lse is None:  # every part needs the log-sum-exp of whole rows
            lse = reduce(_rows(call, selection.whole, None, scope._groups)).lse
        if selection.sampled and lse is not None:
            _audit(call, frame, lse)
        for part in selection.parts:
            sums = reduce(_rows(call, part, lse, scope._groups))
            totals.add(sums, frame.first_key)
        totals.selections.append(selection)
        totals.sampled |= selection.sampled
        if call.sinks is None and not self.top:
            return
        rows = _rows(call, selection.whole, lse, 0)
        known = sums.lse if rows.lse is None else rows.lse
        assert known is not None
        if call.sinks is not None:
            totals.add_sink(torch.exp(call.sinks.float()[:, None] - known), selection)
        if self.top:
            keys, weights = top_keys(rows, known, self.top)
            where = selection.rows(frame.positions().expand(frame.batch, -1))
            where = where.where(selection.rows(selection.counted_queries()), -1)
            keys = keys.where(keys < 0, keys + frame.first_key)
            totals.top.append((where.to(keys.device), keys, weights))


def _continue(totals: LayerTotals, frame: Frame) -> None:
    """Make sure that a pass with a past follows the one before it."""
    if frame.first_query != totals.position:
        raise ScopeError(
            f"this forward pass continues at token {frame.first_query}, but {totals.position} "
            "tokens were seen so far; run the whole sequence inside the with block"
        )
    if bool((totals.first < 0).any()):
        totals.first = torch.where(totals.first < 0, frame.first_real(), totals.first)


def _rows(call: AttentionCall, part: Part, lse: Tensor | None, groups: int) -> Rows:
    """The rows of a part, gathered where it says so."""
    q, k, sinks = call.q, call.k, call.sinks
    if q.requires_grad:
        q = q.detach()
    if part.only is not None:
        q = q[:, :, part.only : part.only + 1]
        lse = None if lse is None else lse[:, :, part.only : part.only + 1]
    elif part.index is not None:
        index = part.index[:, None, :]
        q = q.gather(2, index[..., None].expand(-1, q.shape[1], -1, q.shape[3]))
        lse = None if lse is None else lse.gather(2, index.expand(-1, q.shape[1], -1))
    return Rows(
        q=q,
        k=k.detach() if k.requires_grad else k,
        scale=call.scale,
        causal=part.causal,
        start=part.start,
        stop=part.stop,
        own=part.own,
        lse=lse.detach() if lse is not None and lse.requires_grad else lse,
        real=call.visible.real,
        softcap=call.softcap,
        sinks=sinks.detach() if sinks is not None else None,
        key_bias=None if call.key_bias is None else call.key_bias.detach(),
        distance_bias=None if call.distance_bias is None else call.distance_bias.detach(),
        weight=part.weight,
        shrink=part.shrink,
        group=part.group,
        groups=groups if part.group is not None else 0,
        cache=part.cache,
    )


def _audit(call: AttentionCall, frame: Frame, lse: Tensor) -> None:
    """A few rows, looked at whole: does each add up to 1 under the log-sum-exp we were given?"""
    index = torch.linspace(0, frame.queries - 1, AUDITED).long().expand(frame.batch, -1)
    start, stop = (bound.gather(1, index).int().to(lse.device) for bound in frame.intervals)
    few = Part(rows=AUDITED, index=index.to(lse.device), start=start, stop=stop, own=stop.clone())
    afresh = kernels.kernel("streaming")(_rows(call, few, None, 0)).lse
    assert afresh is not None
    given = lse.gather(2, index[:, None].expand_as(afresh).to(lse.device))
    off = (afresh - given).abs().where((stop > start)[:, None], 0.0).max().item()
    if not off <= 2e-3:
        raise ConservationError(
            f"layer {call.layer}: a row adds up to 1 only within {off:.3g}, measured afresh. "
            "This is a bug: please report it."
        )
