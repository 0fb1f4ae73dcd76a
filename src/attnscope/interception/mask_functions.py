"""Reads the visible range of each query from a transformers mask function, without a matrix.

It reads the functions that `transformers.masking_utils` composes. transformers evaluates any other
function, a few rows at a time.
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
# Mask elements that are evaluated at a time for a function that cannot be read.
MAX_EVALUATED = 1 << 20


class _UnknownMaskError(Exception):
    pass


def is_causal(function: MaskFunction, length: int) -> bool:
    """Whether a mask function hides only future keys, for texts of this length."""
    reader = _builders().get(getattr(function, "__code__", None))
    if reader is _causal:
        return True
    if reader is _all_of:
        (parts,) = _closure_values(function)
        others = [p for p in parts if not _covers_all(p, length)]
        return len(others) == 1 and is_causal(others[0], length)
    return False


def _covers_all(function: MaskFunction, length: int) -> bool:
    """Whether a mask function is a sliding window at least as long as the text."""
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

    Also the mask, bool [B, 1, Q, K], if a range has gaps; else None.
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
    """bool [B, 1, rows, K]: some rows of a mask function, evaluated by transformers."""
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
    """The values that a closure holds."""
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


# All closures of one builder share a code object, so the code object identifies the builder.
# (builder, names in its closure in order, function that reads the visible ranges).
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
    """By code object: how to read the mask functions of the installed transformers.

    Leaves out a builder that is missing or has another closure; its masks are evaluated.
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
