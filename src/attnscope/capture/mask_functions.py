"""From a transformers mask function to intervals: which keys each query sees, without a matrix.

Knows how `transformers.masking_utils` composes its mask functions. A function it does not know is
evaluated by transformers itself, a few rows at a time, and must turn out to be an interval.
Must not know frames, or who asks.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

MaskFunction = Callable[..., Any]
Interval = tuple[Tensor, Tensor]

FAR = 1 << 30
# Elements of a mask evaluated at a time where its function is not one we know.
MAX_EVALUATED = 1 << 20


class _UnknownMaskError(Exception):
    pass


def is_causal(function: MaskFunction, length: int) -> bool:
    """Whether a mask function says no more than "not the future" for texts of this length."""
    reader = _builders().get(getattr(function, "__code__", None))
    if reader is _causal:
        return True
    if reader is _all_of:
        (parts,) = _closure_values(function)
        others = [p for p in parts if not _covers_all(p, length)]
        return len(others) == 1 and is_causal(others[0], length)
    return False


def _covers_all(function: MaskFunction, length: int) -> bool:
    """Whether this is a window as long as the text, which hides nothing."""
    if _builders().get(getattr(function, "__code__", None)) is not _window:
        return False
    (window,) = _closure_values(function)
    return bool(window >= length)


def intervals(
    function: MaskFunction,
    B: int,
    Q: int,
    K: int,
    q_offset: int,
    kv_offset: int,
    use_vmap: bool,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """First and one past last visible key of each query [B, Q], among the keys of the call.

    And who sees whom, [B, 1, Q, K], where there are gaps between them.
    """
    queries = torch.arange(q_offset, q_offset + Q).expand(B, -1)
    visible = None
    try:
        start, stop = _interval(function, queries)
    except _UnknownMaskError:
        evaluate = partial(_evaluate, function, B, K, kv_offset, use_vmap, device)
        step = max(1, MAX_EVALUATED // (B * K))
        parts = [
            bounds_of(evaluate(q_offset + first, min(step, Q - first))[:, 0])
            for first in range(0, Q, step)
        ]
        start = torch.cat([low for low, _, _ in parts], 1) + kv_offset
        stop = torch.cat([high for _, high, _ in parts], 1) + kv_offset
        if not all(contiguous for _, _, contiguous in parts):
            visible = evaluate(q_offset, Q)
    start = (start - kv_offset).clamp(0, K)
    return start, torch.maximum((stop - kv_offset).clamp(0, K), start), visible


def _evaluate(
    function: MaskFunction,
    B: int,
    K: int,
    kv_offset: int,
    use_vmap: bool,
    device: torch.device,
    first: int,
    rows: int,
) -> Tensor:
    """bool [B, 1, rows, K]: what a mask function we do not know says of some rows."""
    visible: Tensor = masking_utils.sdpa_mask(
        batch_size=B,
        q_length=rows,
        kv_length=K,
        q_offset=first,
        kv_offset=kv_offset,
        mask_function=function,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    return visible


def _interval(function: MaskFunction, queries: Tensor) -> Interval:
    """First and one past last visible key of each query [B, Q], in absolute positions."""
    reader = _builders().get(getattr(function, "__code__", None))
    if reader is None:
        raise _UnknownMaskError
    return reader(queries, *_closure_values(function))


def _closure_values(function: MaskFunction) -> list[Any]:
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
    own_ids = ids.gather(1, i)
    return torch.searchsorted(ids, own_ids), torch.searchsorted(ids, own_ids, right=True)


def _all_of(i: Tensor, mask_functions: tuple[MaskFunction, ...]) -> Interval:
    start, stop = _everything(i)
    for function in mask_functions:
        low, high = _interval(function, i)
        start, stop = torch.maximum(start, low), torch.minimum(stop, high)
    return start, stop


# Closures share one code object however often they are made, so a code object names a builder.
# Which builder, what it closes over (in the order of the closure), and how to read it.
_EXAMPLE = torch.zeros(1, dtype=torch.int64)
_BUILDERS: list[tuple[Callable[[], MaskFunction], tuple[str, ...], Callable[..., Interval]]] = [
    (lambda: masking_utils.causal_mask_function, (), _causal),
    (lambda: masking_utils.bidirectional_mask_function, (), _everything),
    (lambda: masking_utils.sliding_window_overlay(1), ("sliding_window",), _window),
    (
        lambda: masking_utils.sliding_window_bidirectional_overlay(1),
        ("sliding_window",),
        _two_sided_window,
    ),
    (
        lambda: masking_utils.chunked_overlay(1, _EXAMPLE),
        ("chunk_size", "left_padding"),
        _chunk,
    ),
    (
        lambda: masking_utils.packed_sequence_mask_function(_EXAMPLE),
        ("packed_sequence_mask",),
        _packed,
    ),
    (lambda: masking_utils.and_masks(), ("mask_functions",), _all_of),
]


@cache
def _builders() -> dict[Any, Callable[..., Interval]]:
    """The builders of this version of transformers that are as we know them.

    One that is gone, or closes over something else, is not among them: its masks are asked.
    """
    builders: dict[Any, Callable[..., Interval]] = {}
    for make, closure_names, reader in _BUILDERS:
        try:
            code: Any = make().__code__
        except (AttributeError, TypeError):
            continue
        if code.co_freevars == closure_names:
            builders[code] = reader
    return builders


def bounds_of(visible: Tensor) -> tuple[Tensor, Tensor, bool]:
    """First and one past last True of each row of [B, rows, K]; whether there are no gaps."""
    order = torch.arange(visible.shape[-1], device=visible.device)
    start = torch.where(visible, order, visible.shape[-1]).amin(-1).cpu()
    stop = torch.where(visible, order + 1, 0).amax(-1).cpu()
    count = visible.sum(-1).cpu()
    contiguous = bool(((stop - start) == count)[count > 0].all())
    return start, torch.maximum(stop, start), contiguous
