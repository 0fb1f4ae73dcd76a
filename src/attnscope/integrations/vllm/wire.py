"""Results of a worker as plain data: mappings, lists, numbers, text and bytes.

vLLM sends plain data between its processes without pickle.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from attnscope import errors
from attnscope.errors import AttnscopeError
from attnscope.kernels import AttentionSums


def encode(value: Any) -> Any:
    """A result as plain data."""
    if isinstance(value, Tensor):
        array = value.detach().cpu().contiguous()
        data = array.flatten().view(torch.uint8).numpy().tobytes() if array.numel() else b""
        dtype = str(array.dtype).removeprefix("torch.")
        return {"type": "tensor", "dtype": dtype, "shape": list(array.shape), "data": data}
    if isinstance(value, AttentionSums):
        parts = {each.name: getattr(value, each.name) for each in fields(value)}
        present = {name: part for name, part in parts.items() if part is not None}
        return {"type": "sums", "parts": encode(present)}
    if isinstance(value, AttnscopeError):
        values = {name: _plain(each) for name, each in value.values.items()}
        details = {"code": value.code, "message": str(value), "values": values}
        return {"type": "error", "class": type(value).__name__} | details
    if isinstance(value, dict):
        return {name: encode(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [encode(each) for each in value]
    return value


def decode(value: Any) -> Any:
    """A result from plain data."""
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and kind in _DECODERS:
            return _DECODERS[kind](value)
        return {name: decode(each) for name, each in value.items()}
    return [decode(each) for each in value] if isinstance(value, list) else value


def _tensor(value: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, value["dtype"])
    if not value["data"]:
        return torch.empty(value["shape"], dtype=dtype)
    return torch.frombuffer(bytearray(value["data"]), dtype=dtype).view(value["shape"])


def _sums(value: dict[str, Any]) -> AttentionSums:
    return AttentionSums(**decode(value["parts"]))


def _error(value: dict[str, Any]) -> AttnscopeError:
    kind = getattr(errors, value["class"], AttnscopeError)
    known = isinstance(kind, type) and issubclass(kind, AttnscopeError)
    error: type[AttnscopeError] = kind if known else AttnscopeError
    return error(value["message"], code=value["code"], **value["values"])


_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "tensor": _tensor,
    "sums": _sums,
    "error": _error,
}


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | None) else str(value)
