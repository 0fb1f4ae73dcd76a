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
LARGE_BYTES = {"cuda": 12 << 20, "cpu": 1 << 20}


_NOTHING = torch.empty(0)


def without_tensors(call: AttentionCall) -> AttentionCall:
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
    span: CompletionSpan
    decode_steps: bool
    """Whether they are single tokens of one reply, and so may wait for the next."""
    geometries: list[Geometry] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    lse: list[Tensor] = field(default_factory=list)
    key_segments: list[tuple[int, Tensor]] = field(default_factory=list)
    """Keys, each piece with the position of its first: as few as cover all that is needed."""
    nbytes: int = 0
    """Bytes that would be free by now if nobody waited."""
    released: tuple[Any, ...] | None = None
    """The latest keys, if the cache alone holds them: a weak reference to its tensor, and their
    shape, strides and offset in its storage."""

    def add(
        self, geometry: Geometry, q: Tensor, k: Tensor, lse: Tensor, known: int | None = None
    ) -> int:
        """One more call; how many bytes it holds, if that is not known of another like it."""
        self.geometries.append(geometry)
        self.q.append(q.detach() if q.requires_grad else q)
        self.lse.append(lse.detach() if lse.requires_grad else lse)
        k = k.detach() if k.requires_grad else k
        nbytes = 0
        if known is None:
            nbytes = q.untyped_storage().nbytes() + lse.untyped_storage().nbytes()
        if self.key_segments and self._supersedes(geometry):
            self.key_segments[-1] = geometry.first_key, k
            self.released = None
        else:
            self.restore()
            if (
                self.key_segments or not self.decode_steps
            ):  # the keys of a step are those of its cache
                nbytes += k.nbytes
            self.key_segments.append((geometry.first_key, k))
        nbytes = nbytes if known is None else known
        self.nbytes += nbytes
        return nbytes

    def _supersedes(self, geometry: Geometry) -> bool:
        """The keys of a frame may replace the latest, unless some that are needed are gone."""
        before = self.key_segments[-2] if len(self.key_segments) > 1 else None
        covered = self.geometries[0].first_key if before is None else before[0] + before[1].shape[2]
        return geometry.first_key <= covered

    def release_keys(self, geometry: Geometry, cached: Tensor | None) -> None:
        """Leave keys to the cache that a call of this frame is about to replace."""
        first, k = self.key_segments[-1]
        if cached is None or self.released is not None or not self._supersedes(geometry):
            return
        if cached.untyped_storage().data_ptr() == k.untyped_storage().data_ptr():
            self.released = ref(cached), k.shape, k.stride(), k.storage_offset()
            self.key_segments[-1] = first, _NOTHING

    def restore(self) -> None:
        """Take keys back from the cache, where the call that was to replace them did not come."""
        if self.released is None:
            return
        (cached, *where), self.released = self.released, None
        tensor = cached()
        if tensor is None:
            raise ScopeError(
                f"layer {self.site.layer} replaced its keys without an attention call, so its "
                "last steps cannot be measured; measure with watch(…, max_pending=0)",
                code="keys-lost",
                layer=self.site.layer,
            )
        self.key_segments[-1] = self.key_segments[-1][0], tensor.detach().as_strided(*where)

    @property
    def size(self) -> int:
        """Bytes of all that waits here."""
        return self.nbytes + sum(k.nbytes for _, k in self.key_segments)

    @property
    def group_key(self) -> tuple[Any, ...]:
        """What lanes must have in common to be measured together."""
        call, q, k = self.call, self.q[0], self.key_segments[0][1]
        return (
            self.site.part,
            id(self.geometries[0]),
            id(self.geometries[-1]),
            len(self.geometries),
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
        at, parts = self.geometries[0].first_key, []
        for first, k in self.key_segments:
            parts.append(k if at == first else k[:, :, at - first :])
            at = first + k.shape[2]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


@dataclass(slots=True, eq=False, kw_only=True)
class PassQueue:
    """Calls of one pass that differ from the first of them by their tensors alone."""

    spec: CallSpec
    leader: SiteQueue
    calls: list[tuple[Site, Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Queries, keys and log-sum-exp of the others."""
    bytes_per_call: int = field(init=False)
    """Bytes that one of them holds."""

    def __post_init__(self) -> None:
        self.bytes_per_call = self.leader.nbytes

    @property
    def size(self) -> int:
        """Bytes of what will be copied to lie together."""
        return (len(self.calls) + 1) * self.bytes_per_call

    def tensors(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """q [B, H, Q, D], k [B, G, K, D] and lse [B, H, Q] of each of them."""
        leader = self.leader
        q, k, lse = [leader.q[0]], [leader.key_segments[0][1]], [leader.lse[0]]
        for _, *tensors in self.calls:
            q.append(tensors[0])
            k.append(tensors[1])
            lse.append(tensors[2])
        return q, k, lse


def group_by_signature(queues: list[SiteQueue]) -> list[list[SiteQueue]]:
    """Lanes that can be measured together."""
    groups: dict[Any, list[SiteQueue]] = {}
    keys_by_call: dict[Any, tuple[Any, ...]] = {}
    for queue in queues:
        # Lanes of one call's terms are alike as long as their frames are.
        call_key = (
            id(queue.call),
            id(queue.geometries[0]),
            id(queue.geometries[-1]),
            len(queue.geometries),
        )
        if call_key not in keys_by_call:
            keys_by_call[call_key] = queue.group_key
        groups.setdefault(keys_by_call[call_key], []).append(queue)
    return list(groups.values())


def stack_queues(queues: list[SiteQueue]) -> tuple[Tensor, Tensor, Tensor]:
    """q [L · B, H, Q, D], k [L · B, G, K, D] and lse [L · B, H, Q] of L lanes that are alike."""
    L, S = len(queues), len(queues[0].geometries)
    k = [queue.keys() for queue in queues]
    if L == S == 1:
        return queues[0].q[0], k[0], queues[0].lse[0]
    lse = torch.cat([lse for queue in queues for lse in queue.lse])
    if S == 1:
        q = cat_in_memory_order([queue.q[0] for queue in queues])
    else:
        q = torch.cat([q for queue in queues for q in queue.q])
        B, H, _, D = queues[0].q[0].shape
        q = q.view(L, S, B, H, D).permute(0, 2, 3, 1, 4).reshape(L * B, H, S, D)
        lse = lse.view(L, S, B, H).permute(0, 2, 3, 1).reshape(L * B, H, S)
    return q, cat_in_memory_order(k), lse


def cat_in_memory_order(tensors: list[Tensor]) -> Tensor:
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


def keys_are_stable(cache: Any, layer: int, k: Tensor, *, in_generate: bool) -> bool:
    """Whether these keys stay what they are, and come back as the first of the next step's.

    A dynamic cache makes new tensors at every step and leaves the old ones alone; a static one
    writes behind its keys, and nobody else writes while `generate` runs (`in_generate`). All others,
    and keys that a model makes from what it cached, are as good as gone after the pass.
    """
    kept = cached_keys(cache, layer)
    if kept is None or kept.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return False
    kind = type(cache.layers[layer])
    if kind is cache_utils.StaticLayer:
        return in_generate
    return kind in (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)


def is_large(call: AttentionCall) -> bool:
    """Whether a call is better measured by itself, at once; one with biases has to be."""
    biased = call.key_bias is not None or call.distance_bias is not None
    return biased or call.q.nbytes >= LARGE_BYTES["cuda" if call.q.is_cuda else "cpu"]


def free_memory(device: torch.device) -> int:
    """Bytes that could still be used, where the tensors are."""
    known = memory.free(str(device) if device.type == "cuda" else "cpu")
    return 4 << 30 if known is None else known
