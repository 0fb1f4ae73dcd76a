"""Queues of pending attention calls, which are reduced together.

A kernel launch costs as much as the arithmetic of a short text, and a decode step has one row.
So queries, log-sum-exp and keys are stored by reference until many calls are reduced in one
launch. Layers are stacked along the batch; decode steps are concatenated over the keys of the last
step. How long a reference is valid depends on the KV cache (`keys_are_stable`).
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

# Calls with at least this many bytes of queries are reduced at once: their arithmetic takes longer
# than the launch, and a queue would only use memory.
LARGE_BYTES = {"cuda": 12 << 20, "cpu": 1 << 20}


_NOTHING = torch.empty(0)


def without_tensors(call: AttentionCall) -> AttentionCall:
    """A call without its tensors, so that a queue does not keep the values in memory."""
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
    """The pending calls of one site, in order."""

    site: Site
    call: AttentionCall
    """What all of them share: scale, soft-cap, sinks. Its tensors are empty."""
    span: CompletionSpan
    decode_steps: bool
    """Whether they are decode steps of one completion, which may be queued for the next step."""
    geometries: list[Geometry] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    lse: list[Tensor] = field(default_factory=list)
    key_segments: list[tuple[int, Tensor]] = field(default_factory=list)
    """Keys with the position of the first one: as few tensors as cover all needed keys."""
    nbytes: int = 0
    """Bytes that this queue keeps from being freed."""
    released: tuple[Any, ...] | None = None
    """The latest keys, if the cache alone holds them: a weak reference to its tensor, and their
    shape, strides and offset in its storage."""

    def add(
        self, geometry: Geometry, q: Tensor, k: Tensor, lse: Tensor, known: int | None = None
    ) -> int:
        """Add a call and return its bytes; `known` are those of a call of the same signature."""
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
            ):  # the cache keeps the keys of a step anyway
                nbytes += k.nbytes
            self.key_segments.append((geometry.first_key, k))
        nbytes = nbytes if known is None else known
        self.nbytes += nbytes
        return nbytes

    def _supersedes(self, geometry: Geometry) -> bool:
        """Whether new keys contain the latest ones, unless a sliding window dropped some."""
        before = self.key_segments[-2] if len(self.key_segments) > 1 else None
        covered = self.geometries[0].first_key if before is None else before[0] + before[1].shape[2]
        return geometry.first_key <= covered

    def release_keys(self, geometry: Geometry, cached: Tensor | None) -> None:
        """Release the latest keys before those of this step arrive; the cache keeps them."""
        first, k = self.key_segments[-1]
        if cached is None or self.released is not None or not self._supersedes(geometry):
            return
        if cached.untyped_storage().data_ptr() == k.untyped_storage().data_ptr():
            self.released = ref(cached), k.shape, k.stride(), k.storage_offset()
            self.key_segments[-1] = first, _NOTHING

    def restore(self) -> None:
        """Take released keys back from the cache, if the call that replaces them was not made."""
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
        """Bytes of all pending tensors of this site."""
        return self.nbytes + sum(k.nbytes for _, k in self.key_segments)

    @property
    def group_key(self) -> tuple[Any, ...]:
        """Queues with the same key can be reduced together."""
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
        """[B, G, K, D]: all keys, from the first one that the first row sees."""
        at, parts = self.geometries[0].first_key, []
        for first, k in self.key_segments:
            parts.append(k if at == first else k[:, :, at - first :])
            at = first + k.shape[2]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


@dataclass(slots=True, eq=False, kw_only=True)
class PassQueue:
    """Calls of one pass with the same signature; they differ in their tensors alone."""

    spec: CallSpec
    leader: SiteQueue
    calls: list[tuple[Site, Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Queries, keys and log-sum-exp of the others."""
    bytes_per_call: int = field(init=False)
    """Bytes of one call."""

    def __post_init__(self) -> None:
        self.bytes_per_call = self.leader.nbytes

    @property
    def size(self) -> int:
        """Bytes that stacking copies."""
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
    """Queues grouped by `group_key`."""
    groups: dict[Any, list[SiteQueue]] = {}
    keys_by_call: dict[Any, tuple[Any, ...]] = {}
    for queue in queues:
        # Queues that share a call differ in their geometries alone.
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
    """q [L · B, H, Q, D], k [L · B, G, K, D] and lse [L · B, H, Q] of L queues of one group."""
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
    """Concatenate [B, H, N, D] along the batch in memory order, so that one kernel copies all."""
    if tensors[0].is_contiguous():
        return torch.cat(tensors)
    return torch.cat([tensor.transpose(1, 2) for tensor in tensors]).transpose(1, 2)


def cached_keys(cache: Any, layer: int) -> Tensor | None:
    """The keys of a layer in a cache; None if it has none or offloads them."""
    layers = getattr(cache, "layers", ())
    if layer >= len(layers) or getattr(cache, "offloading", False):
        return None
    keys: Tensor | None = getattr(layers[layer], "keys", None)
    return keys


def keys_are_stable(cache: Any, layer: int, k: Tensor, *, in_generate: bool) -> bool:
    """Whether these keys stay unchanged, and are the first keys of the next step.

    A dynamic cache creates new tensors at every step. A static cache writes after its keys, and
    only `generate` writes to it (`in_generate`). All other caches may overwrite keys later.
    """
    kept = cached_keys(cache, layer)
    if kept is None or kept.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return False
    kind = type(cache.layers[layer])
    if kind is cache_utils.StaticLayer:
        return in_generate
    return kind in (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)


def is_large(call: AttentionCall) -> bool:
    """Whether a call is reduced at once: it is large, or has score biases."""
    biased = call.key_bias is not None or call.distance_bias is not None
    return biased or call.q.nbytes >= LARGE_BYTES["cuda" if call.q.is_cuda else "cpu"]


def free_memory(device: torch.device) -> int:
    """Bytes of free memory on a device."""
    known = memory.free(str(device) if device.type == "cuda" else "cpu")
    return 4 << 30 if known is None else known
