"""Attention that waits to be measured: layers of a pass together, steps of a reply together.

Starting a kernel costs as much as a short text's arithmetic, and a step of decoding has one row.
So queries, log-sum-exp and keys are kept as they are, by reference, until many calls can be
reduced as one: layers side by side along the batch, steps one below the other over the keys of
the last. Knows how caches of transformers keep their keys, and so how long a reference is good.
"""

from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import cache_utils

from attnscope import memory
from attnscope.capture.forward_pass import CallSpec
from attnscope.capture.generation import CompletionSpan
from attnscope.capture.geometry import Geometry
from attnscope.capture.sites import Site
from attnscope.errors import ScopeError
from attnscope.kernels import AttentionCall

# Queries of one call, in bytes, from which on a kernel of its own is better: by then its launch is
# hidden behind the arithmetic of the layer, and waiting would only hold memory.
LARGE = {"cuda": 12 << 20, "cpu": 1 << 20}


_NOTHING = torch.empty(0)


def bare(call: AttentionCall) -> AttentionCall:
    """A call without its tensors, so that whoever waits does not hold its values."""
    return AttentionCall(
        layer=call.layer,
        q=_NOTHING,
        k=_NOTHING,
        v=_NOTHING,
        scale=call.scale,
        visible=call.visible,
        softcap=call.softcap,
        sinks=call.sinks,
    )


@dataclass(slots=True, eq=False, kw_only=True)
class SiteQueue:
    """The rows of one site that wait, in order."""

    site: Site
    call: AttentionCall
    """What all of them share: scale, soft-cap, sinks. Its tensors are not theirs."""
    reply: CompletionSpan
    steps: bool
    """Whether they are single tokens of one reply, and so may wait for the next."""
    frames: list[Geometry] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    lse: list[Tensor] = field(default_factory=list)
    pieces: list[tuple[int, Tensor]] = field(default_factory=list)
    """Keys, each piece with the position of its first: as few as cover all that is needed."""
    held: int = 0
    """Bytes that would be free by now if nobody waited."""
    released: tuple[Any, ...] | None = None
    """The latest keys, if the cache alone holds them: a weak reference to its tensor, and their
    shape, strides and offset in its storage."""

    def add(
        self, frame: Geometry, q: Tensor, k: Tensor, lse: Tensor, known: int | None = None
    ) -> int:
        """One more call; how many bytes it holds, if that is not known of another like it."""
        self.frames.append(frame)
        self.q.append(q.detach() if q.requires_grad else q)
        self.lse.append(lse.detach() if lse.requires_grad else lse)
        k = k.detach() if k.requires_grad else k
        held = 0
        if known is None:
            held = q.untyped_storage().nbytes() + lse.untyped_storage().nbytes()
        if self.pieces and self._replaced(frame):
            self.pieces[-1] = frame.first_key, k
            self.released = None
        else:
            self.restore()
            if self.pieces or not self.steps:  # the keys of a step are those of its cache
                held += k.nbytes
            self.pieces.append((frame.first_key, k))
        held = held if known is None else known
        self.held += held
        return held

    def _replaced(self, frame: Geometry) -> bool:
        """The keys of a frame may replace the latest, unless some that are needed are gone."""
        before = self.pieces[-2] if len(self.pieces) > 1 else None
        covered = self.frames[0].first_key if before is None else before[0] + before[1].shape[2]
        return frame.first_key <= covered

    def expect(self, frame: Geometry, cached: Tensor | None) -> None:
        """Leave keys to the cache that a call of this frame is about to replace."""
        first, k = self.pieces[-1]
        if cached is None or self.released is not None or not self._replaced(frame):
            return
        if cached.untyped_storage().data_ptr() == k.untyped_storage().data_ptr():
            self.released = ref(cached), k.shape, k.stride(), k.storage_offset()
            self.pieces[-1] = first, _NOTHING

    def restore(self) -> None:
        """Take keys back from the cache, where the call that was to replace them did not come."""
        if self.released is None:
            return
        (cached, *where), self.released = self.released, None
        tensor = cached()
        if tensor is None:
            raise ScopeError(
                f"layer {self.site.layer} replaced its keys without an attention call, so its "
                "last steps cannot be measured; watch with hold=0",
                code="keys-lost",
                layer=self.site.layer,
            )
        self.pieces[-1] = self.pieces[-1][0], tensor.detach().as_strided(*where)

    @property
    def size(self) -> int:
        """Bytes of all that waits here."""
        return self.held + sum(k.nbytes for _, k in self.pieces)

    @property
    def like(self) -> tuple[Any, ...]:
        """What lanes must have in common to be measured together."""
        call, q, k = self.call, self.q[0], self.pieces[0][1]
        return (
            self.site.part,
            id(self.frames[0]),
            id(self.frames[-1]),
            len(self.frames),
            call.scale,
            call.softcap,
            id(call.sinks),
            q.shape,
            k.shape[1],
            q.dtype,
            k.dtype,
            q.device,
        )

    def keys(self) -> Tensor:
        """[B, G, K, D]: all keys, from the first that the first row could see."""
        at, parts = self.frames[0].first_key, []
        for first, k in self.pieces:
            parts.append(k if at == first else k[:, :, at - first :])
            at = first + k.shape[2]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


@dataclass(slots=True, eq=False, kw_only=True)
class PassQueue:
    """Calls of one pass that differ from the first of them by their tensors alone."""

    terms: CallSpec
    first: SiteQueue
    calls: list[tuple[Site, Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Queries, keys and log-sum-exp of the others."""
    each: int = field(init=False)
    """Bytes that one of them holds."""

    def __post_init__(self) -> None:
        self.each = self.first.held

    @property
    def size(self) -> int:
        """Bytes of what will be copied to lie together."""
        return (len(self.calls) + 1) * self.each

    def tensors(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """q [B, H, Q, D], k [B, G, K, D] and lse [B, H, Q] of each of them."""
        first = self.first
        q, k, lse = [first.q[0]], [first.pieces[0][1]], [first.lse[0]]
        for _, *tensors in self.calls:
            q.append(tensors[0])
            k.append(tensors[1])
            lse.append(tensors[2])
        return q, k, lse


def alike(lanes: list[SiteQueue]) -> list[list[SiteQueue]]:
    """Lanes that can be measured together."""
    groups: dict[Any, list[SiteQueue]] = {}
    told: dict[Any, tuple[Any, ...]] = {}
    for lane in lanes:
        # Lanes of one call's terms are alike as long as their frames are.
        brief = id(lane.call), id(lane.frames[0]), id(lane.frames[-1]), len(lane.frames)
        if brief not in told:
            told[brief] = lane.like
        groups.setdefault(told[brief], []).append(lane)
    return list(groups.values())


def together(lanes: list[SiteQueue]) -> tuple[Tensor, Tensor, Tensor]:
    """q [L · B, H, Q, D], k [L · B, G, K, D] and lse [L · B, H, Q] of L lanes that are alike."""
    L, S = len(lanes), len(lanes[0].frames)
    k = [lane.keys() for lane in lanes]
    if L == S == 1:
        return lanes[0].q[0], k[0], lanes[0].lse[0]
    lse = torch.cat([lse for lane in lanes for lse in lane.lse])
    if S == 1:
        q = one_after_another([lane.q[0] for lane in lanes])
    else:
        q = torch.cat([q for lane in lanes for q in lane.q])
        B, H, _, D = lanes[0].q[0].shape
        q = q.view(L, S, B, H, D).permute(0, 2, 3, 1, 4).reshape(L * B, H, S, D)
        lse = lse.view(L, S, B, H).permute(0, 2, 3, 1).reshape(L * B, H, S)
    return q, one_after_another(k), lse


def one_after_another(tensors: list[Tensor]) -> Tensor:
    """[B, H, N, D] each, along the batch, in the order in which they lie in memory: only then
    does one kernel copy them all."""
    if tensors[0].is_contiguous():
        return torch.cat(tensors)
    return torch.cat([tensor.transpose(1, 2) for tensor in tensors]).transpose(1, 2)


def cached_keys(cache: Any, layer: int) -> Tensor | None:
    """The keys that a cache holds of a layer; None where it holds none, or moves them away."""
    layers = getattr(cache, "layers", ())
    if layer >= len(layers) or getattr(cache, "offloading", False):
        return None
    keys: Tensor | None = getattr(layers[layer], "keys", None)
    return keys


def lasting(cache: Any, layer: int, k: Tensor, *, inside: bool) -> bool:
    """Whether these keys stay what they are, and come back as the first of the next step's.

    A dynamic cache makes new tensors at every step and leaves the old ones alone; a static one
    writes behind its keys, and nobody else writes while `generate` runs (`inside`). All others,
    and keys that a model makes from what it cached, are as good as gone after the pass.
    """
    kept = cached_keys(cache, layer)
    if kept is None or kept.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return False
    kind = type(cache.layers[layer])
    if kind is cache_utils.StaticLayer:
        return inside
    return kind in (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)


def large(call: AttentionCall) -> bool:
    """Whether a call is better measured by itself, at once; one with biases has to be."""
    biased = call.key_bias is not None or call.distance_bias is not None
    return biased or call.q.nbytes >= LARGE["cuda" if call.q.is_cuda else "cpu"]


def free_memory(device: torch.device) -> int:
    """Bytes that could still be used, where the tensors are."""
    known = memory.free(str(device) if device.type == "cuda" else "cpu")
    return 4 << 30 if known is None else known
