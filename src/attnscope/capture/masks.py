"""Masks as descriptions: which keys each query sees, in two integers a query, without a matrix.

A mask that transformers is about to make becomes a frame, and travels through the model as a
tensor that carries it; one that comes made is read. Done on the CPU, once per mask and forward.
What a mask function says is read in `mask_functions.py`.
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

from attnscope.capture.geometry import Geometry
from attnscope.capture.mask_functions import (
    EVALUATED,
    MaskFunction,
    bounds_of,
    intervals,
    is_causal,
)
from attnscope.errors import ModelError
from attnscope.kernels.call import Form

MaskBuilder = Callable[..., Any]


class MaskTensor(torch.Tensor):
    """A mask as a description: its frame, and how transformers would have made it.

    Models hand masks on to their attention layers untouched, or moved to another device; both
    keep the description. To whatever else looks at it, it is the mask that transformers would
    have made, and is made only then.
    """

    frame: Geometry
    dense: "LazyMask"

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
        if mask is not None and func in _MOVES:
            with torch._C.DisableTorchFunctionSubclass():
                moved = func(mask.as_subclass(Tensor), *args[1:], **kwargs)
            if moved.dtype == mask.dense.dtype:
                return attach(moved, mask.frame, mask.dense)
        if mask is not None and func in _SAYS:
            return _SAYS[func](mask.dense, *args[1:], **kwargs)
        if func in _SAYS_AS_IT_IS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map_only(MaskTensor, _made, (args, kwargs))
        return func(*args, **kwargs)


def _made(mask: MaskTensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return mask.dense.tensor().to(mask.device)


_MOVES = {Tensor.to, Tensor.contiguous, Tensor.clone, Tensor.detach, Tensor.cuda, Tensor.cpu}
_SAYS: dict[Any, Callable[..., Any]] = {
    Tensor.shape.__get__: lambda dense: dense.shape,  # type: ignore[attr-defined]
    Tensor.dtype.__get__: lambda dense: dense.dtype,  # type: ignore[attr-defined]
    Tensor.ndim.__get__: lambda dense: len(dense.shape),  # type: ignore[attr-defined]
    Tensor.dim: lambda dense: len(dense.shape),
    Tensor.size: lambda dense, dim=None: dense.shape if dim is None else dense.shape[dim],
    Tensor.is_floating_point: lambda dense: dense.dtype.is_floating_point,
}
_SAYS_AS_IT_IS = {
    Tensor.device.__get__,
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.as_subclass,
    Tensor.__hash__,
}


class LazyMask:
    """The mask that transformers would have made, made once and only if somebody looks at it."""

    def __init__(self, make: MaskBuilder, given: dict[str, Any], dtype: torch.dtype):
        self.make = make
        self.given = given
        self.dtype = dtype
        self.shape = torch.Size((given["batch_size"], 1, given["q_length"], given["kv_length"]))

    @cached_property
    def plain(self) -> Any:
        """Just what the model would have been given: None where its attention needs no mask."""
        return self.make(**self.given)

    def tensor(self) -> Tensor:
        """The same, spelled out."""
        if isinstance(self.plain, Tensor):
            return self.plain
        if self._spelled is None:
            whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            self._spelled = self.make(**self.given | whole)
        spelled: Tensor = self._spelled
        return spelled

    _spelled: Tensor | None = None


def attach(tensor: Tensor, frame: Geometry, dense: LazyMask) -> MaskTensor:
    """The tensor as a mask that carries its frame."""
    tagged = tensor.as_subclass(MaskTensor)
    tagged.frame = frame
    tagged.dense = dense
    return tagged


def describe(make: MaskBuilder, implementation: str, **given: Any) -> Any:
    """What transformers calls in place of a mask builder of its own, `make`.

    The names of what is `given` are those of transformers.
    """
    attention_mask: Tensor | None = given.get("attention_mask")
    if attention_mask is not None and attention_mask.ndim != 2:
        return make(**given)
    frame = _frame(**given)
    dtype = given.get("dtype", torch.float32) if implementation == "eager" else torch.bool
    return attach(_stand_in(dtype, frame.device), frame, LazyMask(make, given, dtype))


@lru_cache(maxsize=16)
def _stand_in(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a mask is as a tensor; nobody sees its numbers."""
    return torch.ones(1, 1, 1, 1, dtype=dtype, device=device)


def _frame(
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
    """The frame of a mask; the names are those of transformers."""
    q_offset, kv_offset = int(q_offset), int(kv_offset)
    device = torch.device(device)
    real: Tensor | None = None
    if attention_mask is not None:
        real = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        real = real.bool().cpu()
    if is_causal(mask_function, q_offset + q_length - kv_offset):
        # Keys of a static cache that do not exist yet are seen by nobody, and cut.
        kv_length = min(kv_length, q_offset + q_length - kv_offset)
        bounds = seen = None
    else:
        start, stop, seen = intervals(
            mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, use_vmap, device
        )
        bounds = start, stop
        kv_length = max(int(stop.max()), 1)
    if real is not None and bool(real[:, : kv_offset + kv_length].all()):
        real = None
    if bounds is None:
        return _causal_frame(batch_size, q_length, kv_length, q_offset, kv_offset, real, device)
    frame = build_frame(*bounds, real, q_offset, kv_offset, kv_length, device)
    return frame if seen is None else frame.with_gaps(seen[..., :kv_length])


def _causal_frame(
    B: int,
    Q: int,
    K: int,
    first_query: int,
    first_key: int,
    real: Tensor | None,
    device: torch.device,
) -> Geometry:
    """Each query sees the keys up to its own token; the common case, without a tensor."""
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
    return build_frame(start, stop, real, first_query, first_key, K, device)


def frame_without_mask(q: Tensor, k: Tensor, *, causal: bool) -> Geometry:
    """The frame of a call that came without a mask, read as sdpa reads it."""
    B, Q, K = q.shape[0], q.shape[2], k.shape[2]
    if causal and Q > 1:
        return _causal_frame(B, Q, min(Q, K), 0, 0, None, q.device)
    bounds = torch.zeros(B, Q, dtype=torch.int64), torch.full((B, Q), K)
    return build_frame(*bounds, None, max(K - Q, 0), 0, K, q.device)


# An additive mask hides a key from here on down. Weights are computed with the number itself,
# unless it is so low that no score makes up for it.
HIDES = -1e4
HIDES_FOR_SURE = -1e6


def frame_of_dense(
    mask: Tensor, q: Tensor, K: int, past: int | None, padding: Tensor | None
) -> tuple[Geometry, Tensor | None]:
    """The frame of a 4-D mask, boolean or additive, and what it adds to scores, if anything.

    `past` is the number of tokens in the cache, `padding` the 2-D mask [B, keys] of the text.
    """
    B, Q = q.shape[0], q.shape[2]
    rows, columns = mask.shape[2:] if mask.ndim == 4 else (0, 0)
    if rows not in (1, Q) or columns < K or mask.shape[0] not in (1, B):
        raise ModelError(
            f"this model changed its attention mask to shape {list(mask.shape)} on the way to a "
            f"layer with {Q} queries and {K} keys, which attnscope cannot read",
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
    sure = -math.inf if boolean else lowest(mask)
    step = max(1, EVALUATED // (K * mask.shape[1]))
    for low in range(0, rows, step):
        some = mask[:, :, low : low + step]
        seen = some if boolean else some > HIDES
        if not boolean and bias is None and bool(((some != 0) & (some > sure)).any()):
            bias = mask
        alike = mask.shape[1] == 1 or bool((seen == seen[:, :1]).all())
        start, stop, whole = bounds_of(seen.any(1))
        gaps = gaps or not whole or not alike
        bounds.append((start, stop))
    start, stop = (torch.cat(side, 1).expand(B, Q) for side in zip(*bounds, strict=True))
    # The rest of a static cache is seen by nobody, and cut.
    K = min(max(int(stop.max()), first + Q), K)
    real = None
    if padding is not None and not bool(padding.all()):
        real = torch.ones(B, max(K, first + Q), dtype=torch.bool)
        known = min(padding.shape[1], real.shape[1])
        real[:, :known] = padding[:, :known].bool().cpu()
    frame = build_frame(start, stop, real, first, 0, K, q.device)
    looking = stop > start
    if not bool(looking.all()):  # who sees nothing is padding too
        if frame.real_queries is not None:
            looking = looking & frame.real_queries
        frame = replace(frame, real_queries=looking)
    if gaps:
        frame = frame.with_gaps((mask if boolean else mask > HIDES)[..., :K])
    return frame, bias


def lowest(mask: Tensor) -> float:
    """What hides a key whatever its score: this number, or less."""
    return max(HIDES_FOR_SURE, torch.finfo(mask.dtype).min)


def build_frame(
    start: Tensor,
    stop: Tensor,
    real: Tensor | None,
    first_query: int,
    first_key: int,
    K: int,
    device: torch.device,
) -> Geometry:
    """Fold padding into the intervals and name the form a fused kernel understands."""
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
