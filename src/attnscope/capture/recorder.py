"""One watch at work: takes a model's attention calls as they come, and keeps the sums.

Called by transformers in place of sdpa (the parameter names of `attention` are theirs), and by
hooks where a forward pass begins and ends.
"""

import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnscope import kernels
from attnscope.capture import fallback, masks, sites
from attnscope.capture.frame import Frame, Part, Selection
from attnscope.capture.queries import select
from attnscope.capture.scope import Scope
from attnscope.capture.totals import LayerTotals
from attnscope.errors import ConservationError, ModelError, ScopeError
from attnscope.kernels import AttentionCall, Rows
from attnscope.kernels.attend import attend
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
    """One watch at work: receives the attention calls of a model and keeps its scope up to date."""

    def __init__(self, found: sites.Sites, scope: Scope, top: int):
        self.found = found
        self.scope = scope
        self.top = top
        self.seen: set[int] | None = None
        """Layers seen in the pass under way; None between passes (and while gradient
        checkpointing runs layers a second time)."""
        self.plain: str = cast(Any, found.base).config._attn_implementation
        """What the model was loaded with, and runs when nobody watches."""
        self.dtype = torch.float32
        self.device = device_of(found)
        self.guarded: Any = None
        """The cache under way; only one, or a long loop would keep them all."""

    def hooks(self) -> list[Any]:
        """Mark where a forward pass begins and ends."""
        base = self.found.base
        return [
            base.register_forward_pre_hook(self._begin, with_kwargs=True),
            base.register_forward_hook(self._end),
        ]

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.seen = set()
        self.scope._complete = False
        self._guard(sites.argument(module, "past_key_values", args, kwargs))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        seen, self.seen = self.seen, None
        for totals in self.scope._layers.values():
            if totals.selections:
                totals.selections[-1].forget()
        if not seen:
            raise ModelError(
                f"{type(module).__name__} ran without a single attention that attnscope can see; "
                "models without attention have no attention to measure"
            )
        try:
            self.scope._check(self.dtype)
        except ConservationError:
            self.scope._layers.clear()
            raise
        self.scope._complete = True

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

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """What the model calls in place of sdpa; the names are those of transformers."""
        if position_bias is not None:
            raise ModelError(
                f"{type(module).__name__} adds a position bias to its scores, which attnscope "
                "cannot stream; watch it with backend='eager-fallback'"
            )
        if self.plain == "sdpa" and (softcap is not None or s_aux is not None):
            # Old versions of transformers let sdpa drop them: measure what the model does.
            warnings.warn(
                f"{type(module).__name__} has a soft-cap or sinks, and sdpa, which this model was "
                "loaded with, leaves them out; load it with attn_implementation='eager'",
                stacklevel=2,
            )
            softcap = s_aux = None
        frame = self._frame(module, query, key, attention_mask, is_causal)
        if frame.keys < key.shape[2]:
            key, value = key[:, :, : frame.keys], value[:, :, : frame.keys]
        call = AttentionCall(
            layer=self.found.modules.get(module, -1),
            q=query,
            k=key,
            v=value,
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            visible=frame.visible,
            softcap=softcap,
            sinks=s_aux,
        )
        measured = call.layer in self.scope.layers and self.seen is not None
        selection = self._select(call.layer, frame) if measured else None
        out, lse = attend(call, dropout=dropout, need_lse=selection is not None)
        if self.seen is not None and call.layer >= 0:
            self._once(call.layer)
        if selection is not None:
            with torch.no_grad():
                self._measure(call, frame, selection, lse)
        return out.transpose(1, 2).contiguous(), None

    def _frame(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None,
        is_causal: bool | None,
    ) -> Frame:
        if isinstance(mask, masks.MaskTensor):
            return mask.frame.on(q.device)
        if mask is not None:
            return masks.frame_of_dense(mask, q, k)
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        return masks.frame_without_mask(q, k, causal=causal)

    def _once(self, layer: int) -> None:
        assert self.seen is not None
        if layer in self.seen:
            raise ModelError(
                f"layer {layer} attends twice in one forward pass (layers that share a module, or "
                "cross-attention beside self-attention), so its numbers cannot be told apart"
            )
        self.seen.add(layer)

    def _select(self, layer: int, frame: Frame) -> Selection | None:
        """The counted rows of this call; begins a new sequence where there is no past."""
        scope = self.scope
        if frame.first_query == 0:
            scope._layers[layer] = LayerTotals(
                prompt=frame.first_key + frame.keys,
                first=frame.first_real(),
            )
        elif layer not in scope._layers:
            raise ScopeError(
                "this forward pass continues a cache that was filled before the with block; "
                "run the whole sequence inside it"
            )
        totals = scope._layers[layer]
        position = frame.first_key + frame.keys
        if frame.first_query > 0 and frame.first_query != totals.keys:
            raise ScopeError(
                f"this forward pass continues at token {frame.first_query}, but {totals.keys} "
                "tokens were seen so far; run the whole sequence inside the with block"
            )
        totals.keys = position
        if totals.prompt not in frame.selections:
            frame.selections[totals.prompt] = select(
                scope._queries, frame, totals.prompt, scope._classes, scope._groups
            )
        return frame.selections[totals.prompt]

    def _measure(
        self, call: AttentionCall, frame: Frame, selection: Selection, lse: Tensor | None
    ) -> None:
        self.dtype = call.q.dtype
        backend = self.scope.backend
        if backend == "triton" and call.q.device.type != self.device.type:
            backend = "streaming"  # a layer of a model spread over devices
        reduce = kernels.kernel(backend)
        totals = self.scope._layers[call.layer]
        if selection.sampled and lse is None:  # every part needs the log-sum-exp of whole rows
            lse = reduce(_rows(call, selection.whole, None, self.scope._groups)).lse
        if selection.sampled and lse is not None:
            _audit(call, frame, lse)
        for part in selection.parts:
            sums = reduce(_rows(call, part, lse, self.scope._groups))
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

    def measure_weights(self, module: nn.Module, frame: Frame, A: Tensor) -> None:
        """The fallback: a layer's whole matrix, reduced before the next layer runs."""
        layer = self.found.modules[module]
        if self.seen is None:
            return
        self._once(layer)
        if layer not in self.scope.layers:
            return
        selection = self._select(layer, frame)
        self.dtype = A.dtype
        if selection is not None:
            fallback.reduce(
                A,
                frame,
                selection,
                self.scope._layers[layer],
                self.scope._groups,
                self.top,
                has_sinks=getattr(module, "sinks", None) is not None,
            )


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
