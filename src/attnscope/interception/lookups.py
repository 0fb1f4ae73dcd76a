"""Replaces the lookups of attention and mask functions in transformers, inside `with` blocks.

Models look their attention function up in every call. Inside a block they get `run_attention` with
the original function bound to it; threads without hooks get the original.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from attnscope.interception import masks, patches
from attnscope.interception.compiled_attention import traced_attention, traced_mask
from attnscope.interception.dispatch import run_attention
from attnscope.interception.hooks import current


class _Lookup(threading.local):
    """Whether `get_interface` is running in this thread; it calls the other lookups."""

    get_interface = False


_inside = _Lookup()
_original_get_interface = AttentionInterface.get_interface
_original_get_item = AttentionInterface.__getitem__
_original_get_mask_function = AttentionMaskInterface.__getitem__


def _get_interface(
    self: AttentionInterface, implementation: str, default: Callable[..., Any]
) -> Callable[..., Any]:
    if torch.compiler.is_dynamo_compiling():
        return partial(traced_attention, implementation, default)
    known = current().interfaces.get((implementation, default))
    if known is not None:
        return known
    _inside.get_interface = True
    try:
        original = _original_get_interface(self, implementation, default)
    finally:
        _inside.get_interface = False
    wrapped: Callable[..., Any] = _wrap(original, default, implementation)
    return wrapped


def _get_or_default(self: AttentionInterface, implementation: str, default: Any = None) -> Any:
    """`ALL_ATTENTION_FUNCTIONS.get`; custom model code may look its function up with it."""
    if torch.compiler.is_dynamo_compiling():
        return partial(traced_attention, implementation, default)
    try:
        original = _original_get_item(self, implementation)
    except KeyError:
        original = default
    return original if original is None else _wrap(original, default, implementation)


def _get_item(self: AttentionInterface, implementation: str) -> Any:
    """`ALL_ATTENTION_FUNCTIONS[…]`; this lookup does not name the family's eager attention."""
    if torch.compiler.is_dynamo_compiling():
        return partial(traced_attention, implementation, None)
    return _wrap(_original_get_item(self, implementation), None, implementation)


def _wrap(original: Any, default: Any, implementation: str) -> Any:
    """The function that a model gets in place of an attention function."""
    registry = current()
    if _inside.get_interface or not any(hook.listens for hook in registry.hooks):
        return original
    wrapped = partial(run_attention, registry, original, default, implementation)
    if default is not None:
        registry.interfaces[implementation, default] = wrapped
    return wrapped


def _get_mask_function(self: AttentionMaskInterface, implementation: str) -> Callable[..., Any]:
    original: Callable[..., Any] = _original_get_mask_function(self, implementation)
    if torch.compiler.is_dynamo_compiling():
        return partial(traced_mask, original, implementation)
    if not any(hook.needs_geometry for hook in current().hooks):
        return original
    return partial(masks.build_tagged_mask, original, implementation)


LOOKUPS = patches.lookups(
    {"get_interface": _get_interface, "get": _get_or_default, "__getitem__": _get_item},
    _get_mask_function,
)
