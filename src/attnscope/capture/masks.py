"""From a transformers mask function to intervals: which keys each query sees, without a matrix.

Knows how `transformers.masking_utils` composes its mask functions. A function it does not know is
evaluated by transformers itself, a few rows at a time, and must turn out to be an interval.
All of this is arithmetic on two integers per query, done on the CPU once per mask and forward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from attnscope.capture.frame import Frame
from attnscope.errors import ModelError
from attnscope.kernels.call import Form

__all__ = ["MaskTensor", "build_frame", "frame_of_dense", "frame_without_mask", "mask_function"]

MaskFunction = Callable[..., Any]
Interval = tuple[Tensor, Tensor]

FAR = 1 << 30
# Elements of a mask evaluated at a time where its function is not one we know.
EVALUATED = 1 << 20


class MaskTensor(torch.Tensor):
    """bool [B, 1, 1, K], True at real keys: a mask small enough to exist, with its frame aboard.

    Models hand masks on to their attention layers untouched, or moved to another device; both
    keep the frame. Anything else yields an ordinary tensor, and the frame is gone.
    """

    frame: Frame

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        keeps = func in (Tensor.to, Tensor.contiguous, Tensor.clone, Tensor.detach, Tensor.cuda)
        if keeps and isinstance(args[0], MaskTensor):
            return attach(result.as_subclass(Tensor), args[0].frame)
        return result.as_subclass(Tensor) if isinstance(result, MaskTensor) else result


def attach(tensor: Tensor, frame: Frame) -> MaskTensor:
    """The tensor as a mask that carries its frame."""
    tagged = tensor.as_subclass(MaskTensor)
    tagged.frame = frame
    return tagged


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> MaskTensor:
    """What transformers calls in place of its own mask builders; the names are theirs."""
    q_offset, kv_offset = int(q_offset), int(kv_offset)
    device = torch.device(device)
    real: Tensor | None = None
    if attention_mask is not None:
        real = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        real = real.bool().cpu()
    if _is_causal(mask_function, q_offset + q_length - kv_offset):
        # Keys of a static cache that do not exist yet are seen by nobody, and cut.
        kv_length = min(kv_length, q_offset + q_length - kv_offset)
        bounds = None
    else:
        bounds = _intervals(
            mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, use_vmap, device
        )
        kv_length = max(int(bounds[1].max()), 1)
    if real is not None and bool(real[:, : kv_offset + kv_length].all()):
        real = None
    if bounds is None:
        frame = _causal_frame(batch_size, q_length, kv_length, q_offset, kv_offset, real, device)
    else:
        frame = build_frame(*bounds, real, q_offset, kv_offset, kv_length, device)
    if real is None:
        shown = torch.ones(batch_size, 1, 1, kv_length, dtype=torch.bool, device=device)
    else:
        shown = real[:, None, None, kv_offset : kv_offset + kv_length].to(device)
    return attach(shown, frame)


def _causal_frame(
    B: int,
    Q: int,
    K: int,
    first_query: int,
    first_key: int,
    real: Tensor | None,
    device: torch.device,
) -> Frame:
    """Each query sees the keys up to its own token; the common case, without a tensor."""
    if real is None and (Q == 1 or (Q == K and first_query == first_key)):
        return Frame(
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


def frame_without_mask(q: Tensor, k: Tensor, *, causal: bool) -> Frame:
    """The frame of a call that came without a mask, read as sdpa reads it."""
    B, Q, K = q.shape[0], q.shape[2], k.shape[2]
    if causal and Q > 1:
        return _causal_frame(B, Q, min(Q, K), 0, 0, None, q.device)
    bounds = torch.zeros(B, Q, dtype=torch.int64), torch.full((B, Q), K)
    return build_frame(*bounds, None, max(K - Q, 0), 0, K, q.device)


def frame_of_dense(mask: Tensor, q: Tensor, k: Tensor) -> Frame:
    """The frame of a user's own 4-D mask, boolean or additive; it must consist of intervals."""
    B, Q, K = q.shape[0], q.shape[2], k.shape[2]
    if mask.ndim != 4 or mask.shape[2] != Q or mask.shape[3] < K or mask.shape[1] != 1:
        raise ModelError(
            f"this model changed its attention mask to shape {list(mask.shape)} on the way to a "
            f"layer with {Q} queries and {K} keys; watch it with backend='eager-fallback'"
        )
    bounds = []
    step = max(1, EVALUATED // K)
    for first in range(0, Q, step):
        rows = mask[:, 0, first : first + step, :K]
        seen = rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min / 2
        bounds.append(_bounds(seen))
    start, stop = (torch.cat(side, 1).expand(B, Q) for side in zip(*bounds, strict=True))
    real = torch.ones(B, max(K, Q), dtype=torch.bool)
    real[:, K - Q : K] = stop > start
    return build_frame(start, stop, None if bool(real.all()) else real, K - Q, 0, K, q.device)


def build_frame(
    start: Tensor,
    stop: Tensor,
    real: Tensor | None,
    first_query: int,
    first_key: int,
    K: int,
    device: torch.device,
) -> Frame:
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
    return Frame(
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


class _UnknownMaskError(Exception):
    pass


def _is_causal(function: MaskFunction, length: int) -> bool:
    """Whether a mask function says no more than "not the future" for texts of this length."""
    code = getattr(function, "__code__", None)
    if code is masking_utils.causal_mask_function.__code__:
        return True
    if _KNOWN.get(code) is _all_of:
        (parts,) = _closed_over(function)
        plain = [p for p in parts if not _reaches(p, length)]
        return len(plain) == 1 and _is_causal(plain[0], length)
    return False


def _reaches(function: MaskFunction, length: int) -> bool:
    """Whether this is a window as long as the text, which hides nothing."""
    if _KNOWN.get(getattr(function, "__code__", None)) is not _window:
        return False
    (window,) = _closed_over(function)
    return bool(window >= length)


def _intervals(
    function: MaskFunction,
    B: int,
    Q: int,
    K: int,
    q_offset: int,
    kv_offset: int,
    use_vmap: bool,
    device: torch.device,
) -> Interval:
    """First and one past last visible key of each query [B, Q], among the keys of the call."""
    queries = torch.arange(q_offset, q_offset + Q).expand(B, -1)
    try:
        start, stop = _interval(function, queries)
    except _UnknownMaskError:
        start, stop = _evaluate(function, B, Q, K, q_offset, kv_offset, use_vmap, device)
    start = (start - kv_offset).clamp(0, K)
    return start, torch.maximum((stop - kv_offset).clamp(0, K), start)


def _interval(function: MaskFunction, queries: Tensor) -> Interval:
    """First and one past last visible key of each query [B, Q], in absolute positions."""
    code: Any = getattr(function, "__code__", None)
    if code not in _KNOWN:
        raise _UnknownMaskError
    named = dict(zip(code.co_freevars, _closed_over(function), strict=True))
    return _KNOWN[code](queries, **named)


def _closed_over(function: MaskFunction) -> list[Any]:
    """The values a closure was made with."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _causal(i: Tensor) -> Interval:
    return torch.zeros_like(i), i + 1


def _everything(i: Tensor) -> Interval:
    return torch.zeros_like(i), torch.full_like(i, FAR)


def _window(i: Tensor, sliding_window: int) -> Interval:
    return i - sliding_window + 1, torch.full_like(i, FAR)


def _two_sided_window(i: Tensor, sliding_window: int) -> Interval:
    return i - sliding_window, i + sliding_window + 1


def _chunk(i: Tensor, chunk_size: int, left_padding: Tensor) -> Interval:
    left = left_padding.cpu()[:, None]
    start = left + torch.div(i - left, chunk_size, rounding_mode="floor") * chunk_size
    return start, start + chunk_size


def _packed(i: Tensor, packed_sequence_mask: Tensor) -> Interval:
    ids = packed_sequence_mask.cpu().contiguous()  # never decreases along the sequence
    mine = ids.gather(1, i)
    return torch.searchsorted(ids, mine), torch.searchsorted(ids, mine, right=True)


def _all_of(i: Tensor, mask_functions: tuple[MaskFunction, ...]) -> Interval:
    start, stop = _everything(i)
    for function in mask_functions:
        low, high = _interval(function, i)
        start, stop = torch.maximum(start, low), torch.minimum(stop, high)
    return start, stop


# Closures share one code object however often they are made, so a code object names a builder.
_SOME = torch.zeros(1, dtype=torch.int64)
_KNOWN: dict[Any, Callable[..., Interval]] = {
    masking_utils.causal_mask_function.__code__: _causal,
    masking_utils.bidirectional_mask_function.__code__: _everything,
    masking_utils.sliding_window_overlay(1).__code__: _window,
    masking_utils.sliding_window_bidirectional_overlay(1).__code__: _two_sided_window,
    masking_utils.chunked_overlay(1, _SOME).__code__: _chunk,
    masking_utils.packed_sequence_mask_function(_SOME).__code__: _packed,
    masking_utils.and_masks().__code__: _all_of,
}


def _evaluate(
    function: MaskFunction,
    B: int,
    Q: int,
    K: int,
    q_offset: int,
    kv_offset: int,
    use_vmap: bool,
    device: torch.device,
) -> Interval:
    """Intervals of a mask function we do not know, by asking transformers a few rows at a time."""
    bounds = []
    step = max(1, EVALUATED // (B * K))
    for first in range(0, Q, step):
        seen = masking_utils.sdpa_mask(
            batch_size=B,
            q_length=min(step, Q - first),
            kv_length=K,
            q_offset=q_offset + first,
            kv_offset=kv_offset,
            mask_function=function,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        bounds.append(_bounds(seen[:, 0]))
    start, stop = (torch.cat(side, 1) for side in zip(*bounds, strict=True))
    return start + kv_offset, stop + kv_offset


def _bounds(seen: Tensor) -> Interval:
    """First and one past last True of each row of [B, rows, K]; a row with gaps is an error."""
    order = torch.arange(seen.shape[-1], device=seen.device)
    start = torch.where(seen, order, seen.shape[-1]).amin(-1).cpu()
    stop = torch.where(seen, order + 1, 0).amax(-1).cpu()
    count = seen.sum(-1).cpu()
    if bool(((stop - start) != count)[count > 0].any()):
        raise ModelError(
            "this mask lets a query see keys with gaps between them, which attnscope cannot "
            "stream; watch the model with backend='eager-fallback'"
        )
    return start, torch.maximum(stop, start)
