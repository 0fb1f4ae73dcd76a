"""Converts attention masks to a geometry: the visible range of each query, without a matrix.

A mask that transformers is about to build becomes a small tensor with the geometry as a tag. The
model passes it to its layers. A dense mask is read. This runs on the CPU, once per mask and pass.
`mask_functions.py` reads the mask functions of transformers.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import masking_utils

from attnscope.errors import ModelError
from attnscope.interception.geometry import Geometry
from attnscope.interception.mask_functions import (
    MAX_EVALUATED,
    MaskFunction,
    bounds_of,
    intervals,
    is_causal,
)
from attnscope.kernels.call import Form

MaskBuilder = Callable[..., Any]


class MaskTensor(torch.Tensor):
    """A mask that carries its geometry, and builds the dense mask of transformers on first use.

    Models pass masks to their attention layers unchanged, or move them to another device. Both keep
    the geometry. Every other operation uses the dense mask, which is built only then.
    """

    geometry: Geometry
    lazy: "LazyMask"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        mask = args[0] if args and isinstance(args[0], MaskTensor) else None
        if mask is not None and func in _PRESERVING_OPS:
            with torch._C.DisableTorchFunctionSubclass():
                moved = func(mask.as_subclass(Tensor), *args[1:], **kwargs)
            if moved.dtype == mask.lazy.dtype:
                return tag(moved, mask.geometry, mask.lazy)
        if mask is not None and func in _ATTRIBUTES:
            return _ATTRIBUTES[func](mask.lazy, *args[1:], **kwargs)
        if func in _PLACEHOLDER_OPS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map_only(MaskTensor, _materialize, (args, kwargs))
        return func(*args, **kwargs)


def _materialize(mask: MaskTensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return mask.lazy.tensor().to(mask.device)


_PRESERVING_OPS = {
    Tensor.to,
    Tensor.contiguous,
    Tensor.clone,
    Tensor.detach,
    Tensor.cuda,
    Tensor.cpu,
}
_ATTRIBUTES: dict[Any, Callable[..., Any]] = {
    Tensor.shape.__get__: lambda lazy: lazy.shape,  # type: ignore[attr-defined]
    Tensor.dtype.__get__: lambda lazy: lazy.dtype,  # type: ignore[attr-defined]
    Tensor.ndim.__get__: lambda lazy: len(lazy.shape),  # type: ignore[attr-defined]
    Tensor.dim: lambda lazy: len(lazy.shape),
    Tensor.size: lambda lazy, dim=None: lazy.shape if dim is None else lazy.shape[dim],
    Tensor.is_floating_point: lambda lazy: lazy.dtype.is_floating_point,
}
_PLACEHOLDER_OPS = {
    Tensor.device.__get__,
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.as_subclass,
    Tensor.__hash__,
}


class LazyMask:
    """The dense mask of transformers, built once and only on first use."""

    def __init__(self, build: MaskBuilder, kwargs: dict[str, Any], dtype: torch.dtype):
        self.build = build
        self.kwargs = kwargs
        self.dtype = dtype
        self.shape = torch.Size((kwargs["batch_size"], 1, kwargs["q_length"], kwargs["kv_length"]))

    @cached_property
    def original(self) -> Any:
        """What transformers passes to the model: None if its attention needs no mask."""
        return self.build(**self.kwargs)

    def tensor(self) -> Tensor:
        """The dense mask, also where transformers would pass None."""
        if isinstance(self.original, Tensor):
            return self.original
        if self._tensor is None:
            no_skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            self._tensor = self.build(**self.kwargs | no_skips)
        result: Tensor = self._tensor
        return result

    _tensor: Tensor | None = None


def tag(tensor: Tensor, geometry: Geometry, lazy: LazyMask) -> MaskTensor:
    """The tensor as a mask that carries its geometry."""
    tagged = tensor.as_subclass(MaskTensor)
    tagged.geometry = geometry
    tagged.lazy = lazy
    return tagged


def build_tagged_mask(build: MaskBuilder, implementation: str, **kwargs: Any) -> Any:
    """Replaces a mask builder of transformers, `build`; the names in `kwargs` are those of
    transformers."""
    attention_mask: Tensor | None = kwargs.get("attention_mask")
    if attention_mask is not None and attention_mask.ndim != 2:
        return build(**kwargs)
    geometry = _geometry_of_mask(**kwargs)
    dtype = kwargs.get("dtype", torch.float32) if implementation == "eager" else torch.bool
    return tag(placeholder(dtype, geometry.device), geometry, LazyMask(build, kwargs, dtype))


@lru_cache(maxsize=16)
def placeholder(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The storage of a mask tensor; its values are never read."""
    return torch.ones(1, 1, 1, 1, dtype=dtype, device=device)


def _geometry_of_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Geometry:
    """The geometry of a mask; the parameter names are those of transformers."""
    q_offset, kv_offset = int(q_offset), int(kv_offset)
    device = torch.device(device)
    real: Tensor | None = None
    if attention_mask is not None:
        real = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        real = real.bool().cpu()
    if is_causal(mask_function, q_offset + q_length - kv_offset):
        # Drop the empty slots of a static cache, which no query sees.
        kv_length = min(kv_length, q_offset + q_length - kv_offset)
        bounds = visible = None
    else:
        start, stop, visible = intervals(
            mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, use_vmap, device
        )
        bounds = start, stop
        kv_length = max(int(stop.max()), 1)
    if real is not None and bool(real[:, : kv_offset + kv_length].all()):
        real = None
    if bounds is None:
        return _causal_geometry(batch_size, q_length, kv_length, q_offset, kv_offset, real, device)
    geometry = build_geometry(*bounds, real, q_offset, kv_offset, kv_length, device)
    return geometry if visible is None else geometry.with_gaps(visible[..., :kv_length])


def _causal_geometry(
    B: int,
    Q: int,
    K: int,
    first_query: int,
    first_key: int,
    real: Tensor | None,
    device: torch.device,
) -> Geometry:
    """The geometry of a causal mask; without padding it needs no tensor."""
    if real is None and (Q == 1 or (Q == K and first_query == first_key)):
        return Geometry(
            batch=B,
            queries=Q,
            keys=K,
            first_query=first_query,
            first_key=first_key,
            device=device,
            form="full" if Q == 1 else "causal",
        )
    start = torch.zeros(B, Q, dtype=torch.int64)
    stop = torch.arange(first_query - first_key + 1, first_query - first_key + Q + 1).expand(B, Q)
    return build_geometry(start, stop, real, first_query, first_key, K, device)


def geometry_without_mask(q: Tensor, k: Tensor, *, causal: bool) -> Geometry:
    """The geometry of a call without a mask, as sdpa interprets it."""
    B, Q, K = q.shape[0], q.shape[2], k.shape[2]
    if causal and Q > 1:
        return _causal_geometry(B, Q, min(Q, K), 0, 0, None, q.device)
    bounds = torch.zeros(B, Q, dtype=torch.int64), torch.full((B, Q), K)
    return build_geometry(*bounds, None, max(K - Q, 0), 0, K, q.device)


# An additive mask hides a key at or below this value. Weights are computed with the value itself,
# unless it is so low (MASK_CERTAIN) that no score can outweigh it.
MASK_THRESHOLD = -1e4
MASK_CERTAIN = -1e6


def geometry_of_dense(
    mask: Tensor, q: Tensor, K: int, past: int | None, padding: Tensor | None
) -> tuple[Geometry, Tensor | None]:
    """The geometry of a 4-D mask, boolean or additive, and its score bias, if it has one.

    `past` is the number of tokens in the KV cache, `padding` the 2-D mask [B, keys] of the text.
    """
    B, Q = q.shape[0], q.shape[2]
    rows, columns = mask.shape[2:] if mask.ndim == 4 else (0, 0)
    if rows not in (1, Q) or columns < K or mask.shape[0] not in (1, B):
        raise ModelError(
            f"the model passes an attention mask of shape {list(mask.shape)} to a layer with {Q} "
            f"queries and {K} keys; attnscope reads masks [batch, heads, queries, keys]: pass "
            f"a mask of shape [{B}, 1, {Q}, {K}]",
            code="unsupported-mask",
            mask=tuple(mask.shape),
            call=(Q, K),
        )
    mask = mask[..., :K]
    if mask.dtype != torch.bool and not mask.is_floating_point():
        mask = mask != 0
    first = K - Q if past is None else past
    boolean = mask.dtype == torch.bool
    bounds, gaps, bias = [], False, None
    floor = -math.inf if boolean else mask_floor(mask)
    step = max(1, MAX_EVALUATED // (K * mask.shape[1]))
    for low in range(0, rows, step):
        block = mask[:, :, low : low + step]
        visible = block if boolean else block > MASK_THRESHOLD
        if not boolean and bias is None and bool(((block != 0) & (block > floor)).any()):
            bias = mask
        same_for_heads = mask.shape[1] == 1 or bool((visible == visible[:, :1]).all())
        start, stop, contiguous = bounds_of(visible.any(1))
        gaps = gaps or not contiguous or not same_for_heads
        bounds.append((start, stop))
    start, stop = (torch.cat(side, 1).expand(B, Q) for side in zip(*bounds, strict=True))
    # Drop the empty slots of a static cache, which no query sees.
    K = min(max(int(stop.max()), first + Q), K)
    real = None
    if padding is not None and not bool(padding.all()):
        real = torch.ones(B, max(K, first + Q), dtype=torch.bool)
        length = min(padding.shape[1], real.shape[1])
        real[:, :length] = padding[:, :length].bool().cpu()
    geometry = build_geometry(start, stop, real, first, 0, K, q.device)
    sees_a_key = stop > start
    if not bool(sees_a_key.all()):  # a query that sees no key counts as padding
        if geometry.real_queries is not None:
            sees_a_key = sees_a_key & geometry.real_queries
        geometry = replace(geometry, real_queries=sees_a_key)
    if gaps:
        geometry = geometry.with_gaps((mask if boolean else mask > MASK_THRESHOLD)[..., :K])
    return geometry, bias


def mask_floor(mask: Tensor) -> float:
    """The largest mask value that hides a key whatever its score."""
    return max(MASK_CERTAIN, torch.finfo(mask.dtype).min)


def build_geometry(
    start: Tensor,
    stop: Tensor,
    real: Tensor | None,
    first_query: int,
    first_key: int,
    K: int,
    device: torch.device,
) -> Geometry:
    """Apply padding to the visible ranges, and name the form that a fused kernel supports."""
    B, Q = start.shape
    holes = real_queries = None
    if real is not None:
        keys = real[:, first_key : first_key + K]
        real_queries = real[:, first_query : first_query + Q]
        count, order = keys.sum(1), torch.arange(K)
        first = torch.where(keys, order, K).amin(1)
        last = torch.where(keys, order, -1).amax(1)
        start = torch.maximum(start, first[:, None])
        stop = torch.maximum(torch.minimum(stop, last[:, None] + 1), start)
        if bool((count != last - first + 1)[count > 0].any()):
            holes = keys
    form: Form = "interval"
    if holes is None and not bool(start.any()):
        if bool((stop == K).all()):
            form = "full"
        elif Q == K and first_query == first_key and bool((stop == torch.arange(1, K + 1)).all()):
            form = "causal"
    return Geometry(
        batch=B,
        queries=Q,
        keys=K,
        first_query=first_query,
        first_key=first_key,
        device=device,
        form=form,
        bounds=(start, stop) if form == "interval" else None,
        real_queries=real_queries,
        real_keys=holes,
    )
