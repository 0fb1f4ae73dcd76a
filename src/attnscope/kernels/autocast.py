"""`torch.autocast`: what it rounds before attention, and arithmetic that it must not round."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type that autocast rounds the tensors of sdpa to on this device; None where it is off."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def round_as_autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as sdpa takes it under autocast: float64 and other types stay as they are."""
    if tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(dtype)
    return tensor


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, with autocast off while it runs."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return run
