"""Pending attention calls: captured, not measured yet.

A kernel launch costs as much as the arithmetic of a short text, and a decode step has one row. So
the tensors of short calls are held by reference until many calls are reduced in one launch. Layers
are stacked along the batch; decode steps are concatenated over the keys of the last step.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import cache_utils

from attnscope import memory
from attnscope.interception.captured_call import CallSpec, CapturedCall
from attnscope.interception.generation import CompletionSpan
from attnscope.interception.geometry import Geometry
from attnscope.interception.sites import Site

MAX_SHARE = 1 / 256
"""The share of free memory that pending calls may use; 0 measures each call at once."""
# Pending calls may always use this many bytes. Up to here, the free memory of the device is not
# read, because that takes longer than a kernel launch.
MIN_BUDGET = 64 << 20
# Calls with at least this many bytes of queries are reduced at once: their arithmetic takes longer
# than the launch, and a queue would only use memory.
LARGE_BYTES = {"cuda": 12 << 20, "cpu": 1 << 20}

Moment = Literal["call", "pass ends", "call that does not follow", "read", "generate ends", "leave"]
"""When pending calls may be measured: see `PendingCalls.is_due`."""


@dataclass(slots=True, eq=False, kw_only=True)
class SiteCalls:
    """The pending calls of one site, in order: one call, or decode steps of one completion."""

    site: Site
    spec: CallSpec
    """The spec of the first call."""
    span: CompletionSpan
    kv_heads: int
    cache_layer: Any = None
    """The layer of the KV cache that holds the keys of these decode steps; None if it may change
    its keys, or if these are not decode steps."""
    geometries: list[Geometry] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)
    lse: list[Tensor | None] = field(default_factory=list)
    key_segments: list[tuple[int, Tensor]] = field(default_factory=list)
    """Keys with the position of the first one: as few tensors as cover all needed keys. Empty if
    the cache layer holds all of them."""

    def add(self, captured: CapturedCall) -> int:
        """Add a call; return how many bytes of keys it keeps from being freed."""
        geometry, q, k, lse = captured.geometry, captured.q, captured.k, captured.lse
        assert q is not None
        assert k is not None
        self.geometries.append(geometry)
        self.q.append(q.detach() if q.requires_grad else q)
        self.lse.append(lse.detach() if lse is not None and lse.requires_grad else lse)
        if type(self.cache_layer) in _KEEPS_ALL_KEYS:
            return 0
        segment = geometry.first_key, k.detach() if k.requires_grad else k
        if self.key_segments and geometry.first_key <= self._covered():
            self.key_segments[-1] = segment  # the new keys contain the latest ones
            return 0
        self.key_segments.append(segment)
        held_by_cache = self.cache_layer is not None and len(self.key_segments) == 1
        return 0 if held_by_cache else k.nbytes

    def _covered(self) -> int:
        """Position up to which the segments before the last one have all needed keys."""
        if len(self.key_segments) == 1:
            return self.geometries[0].first_key
        first, k = self.key_segments[-2]
        return first + k.shape[2]

    def keys(self) -> Tensor:
        """[B, G, K, D]: all keys, from the first one that the first row sees."""
        if not self.key_segments:
            keys: Tensor = self.cache_layer.keys[:, :, : self.geometries[-1].keys]
            return keys.detach() if keys.requires_grad else keys
        at, parts = self.geometries[0].first_key, []
        for first, k in self.key_segments:
            parts.append(k if at == first else k[:, :, at - first :])
            at = first + k.shape[2]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    @property
    def size(self) -> int:
        """Bytes of all tensors of these calls, which stacking copies."""
        keys = [k for _, k in self.key_segments] or [self.keys()]
        return self.spec.nbytes * len(self.geometries) + sum(k.nbytes for k in keys)

    def is_continued_by(self, captured: CapturedCall, span: CompletionSpan) -> bool:
        """Whether a call is the next decode step of these."""
        last, spec = self.geometries[-1], captured.spec
        assert spec is not None
        return (
            self.cache_layer is not None
            and captured.lse is not None
            and spec.geometry.queries == 1
            and spec.geometry.first_query == last.first_query + last.queries >= span.start
            and spec.scale == self.spec.scale
            and spec.softcap == self.spec.softcap
            and spec.sinks is self.spec.sinks
            and spec.can_stack
        )

    @property
    def group_key(self) -> tuple[Any, ...]:
        """Calls of sites with the same key can be reduced together."""
        spec, q = self.spec, self.q[0]
        return (
            self.site.part,
            tuple(map(id, self.geometries)),
            spec.scale,
            spec.softcap,
            id(spec.sinks),
            None if spec.can_stack and self.lse[0] is not None else id(spec),
            q.shape,
            self.kv_heads,
            q.dtype,
            q.device,
        )


class PendingCalls:
    """The queue of a watch: the pending calls of all its sites, and when to measure them."""

    def __init__(self, device: torch.device, *, together: bool = True) -> None:
        self.device = device
        self.together = together and MAX_SHARE > 0
        """Whether calls are measured together; otherwise each one at once."""
        self.calls: dict[Site, SiteCalls] = {}
        self.nbytes = 0
        """Bytes that the queue keeps from being freed."""
        self._budget: int | None = None

    def add(self, captured: CapturedCall, span: CompletionSpan, cache_layer: Any) -> None:
        """Add a call; `cache_layer` holds the keys of a decode step, if they are stable."""
        spec, calls = captured.spec, self.calls.get(captured.site)
        assert spec is not None
        assert captured.k is not None
        if calls is None:
            calls = self.calls[captured.site] = SiteCalls(
                site=captured.site,
                spec=spec,
                span=span,
                kv_heads=captured.k.shape[1],
                cache_layer=cache_layer,
            )
        if not spec.nbytes:
            tensors = (captured.q, captured.lse)
            spec.nbytes = sum(t.untyped_storage().nbytes() for t in tensors if t is not None)
        self.nbytes += spec.nbytes + calls.add(captured)

    def is_due(self, moment: Moment, captured: CapturedCall | None = None) -> bool:
        """The flush policy: whether pending calls are measured at this moment.

        After a call: if it is large or cannot be stacked, or if the budget is used up. At the end
        of a pass: unless all calls are decode steps within the budget. At other moments: always.
        """
        if moment == "pass ends":
            steps = all(calls.cache_layer is not None for calls in self.calls.values())
            return not (steps and self.fits(self.nbytes))
        if moment == "call" and captured is not None and captured.spec is not None:
            can_stack = self.together and captured.lse is not None and captured.spec.can_stack
            step = self.calls[captured.site].cache_layer is not None
            return is_large(captured.q) or not can_stack or not (step or self.fits(self.nbytes))
        return True

    def fits(self, nbytes: int) -> bool:
        """Whether pending calls may use this many bytes."""
        if nbytes <= MIN_BUDGET:
            return True
        if self._budget is None:
            self._budget = int(MAX_SHARE * free_memory(self.device))
        return nbytes <= self._budget

    def take(self) -> list[list[SiteCalls]]:
        """Remove all calls, and return them in groups that can be reduced together."""
        groups: dict[Any, list[SiteCalls]] = {}
        for calls in self.calls.values():
            groups.setdefault(calls.group_key, []).append(calls)
        self.calls, self.nbytes = {}, 0
        return list(groups.values())

    def drop(self, stack: str) -> None:
        """Remove the calls of a stack without measuring them."""
        self.calls = {site: calls for site, calls in self.calls.items() if site.stack != stack}
        if not self.calls:
            self.nbytes = 0


def is_large(q: Tensor | None) -> bool:
    """Whether a call with these queries is reduced at once."""
    return q is not None and q.nbytes >= LARGE_BYTES["cuda" if q.is_cuda else "cpu"]


def stack_calls(group: list[SiteCalls]) -> tuple[Tensor, Tensor, Tensor | None]:
    """q [L · B, H, Q, D], k [L · B, G, K, D] and lse [L · B, H, Q] of the L sites of a group."""
    L, S = len(group), len(group[0].geometries)
    k = [calls.keys() for calls in group]
    if L == S == 1:
        return group[0].q[0], k[0], group[0].lse[0]
    lse = torch.cat([lse for calls in group for lse in calls.lse if lse is not None])
    if S == 1:
        q = _cat_in_memory_order([calls.q[0] for calls in group])
    else:
        q = torch.cat([q for calls in group for q in calls.q])
        B, H, _, D = group[0].q[0].shape
        q = q.view(L, S, B, H, D).permute(0, 2, 3, 1, 4).reshape(L * B, H, S, D)
        lse = lse.view(L, S, B, H).permute(0, 2, 3, 1).reshape(L * B, H, S)
    return q, _cat_in_memory_order(k), lse


def _cat_in_memory_order(tensors: list[Tensor]) -> Tensor:
    """Concatenate [B, H, N, D] along the batch in memory order, so that one kernel copies all."""
    if tensors[0].is_contiguous():
        return torch.cat(tensors)
    return torch.cat([tensor.transpose(1, 2) for tensor in tensors]).transpose(1, 2)


def unstack(tensor: Tensor, n: int) -> tuple[Tensor, ...]:
    """Split [n · B, …] into n tensors [B, …]."""
    return tensor.view(n, tensor.shape[0] // n, *tensor.shape[1:]).unbind(0)


_KEEPS_ALL_KEYS = (cache_utils.DynamicLayer, cache_utils.StaticLayer)
"""Cache layers whose `keys` begin with all earlier keys."""
_DYNAMIC = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
"""Cache layers that create new tensors at every step, and never overwrite keys."""


def cache_overwrites(cache: Any) -> bool:
    """Whether the cache may overwrite keys later. A dynamic cache does not."""
    if cache is None:
        return False
    return type(cache) is not cache_utils.DynamicCache or any(
        type(layer) not in _DYNAMIC for layer in cache.layers
    )


def stable_cache_layer(cache: Any, layer: int, k: Tensor, *, in_generate: bool) -> Any:
    """The layer of a cache that holds these keys and never changes them; None if there is none.

    A static cache writes after its keys, and only `generate` writes to it (`in_generate`). Caches
    that are neither dynamic nor static may overwrite keys later.
    """
    layers = getattr(cache, "layers", ())
    if layer >= len(layers) or getattr(cache, "offloading", False):
        return None
    cached = getattr(layers[layer], "keys", None)
    if cached is None or cached.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return None
    kind = type(layers[layer])
    stable = in_generate if kind is cache_utils.StaticLayer else kind in _DYNAMIC
    return layers[layer] if stable else None


def free_memory(device: torch.device) -> int:
    """Bytes of free memory on a device."""
    known = memory.free(str(device) if device.type == "cuda" else "cpu")
    return 4 << 30 if known is None else known
