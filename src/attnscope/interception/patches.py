"""Every patch that attnscope applies to the process, reference-counted under one lock.

A patch is applied with its first user and undone with its last. Blocks may end in any order and in
any thread. Patched are: the lookups of attention and mask functions in transformers, `generate`
with its stopping criteria and decoding methods, methods that reorder or crop a KV cache, and the
stance of the compiler.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch._dynamo import eval_frame
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin

_lock = threading.RLock()
_active: dict[Any, tuple[int, ExitStack]] = {}
"""By key: how many users a patch has, and how to undo it."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def acquire(key: Any, apply: Callable[[], ExitStack]) -> None:
    """Add a user of a patch; the first user applies it."""
    with _lock:
        count, undo = _active[key] if key in _active else (0, apply())
        _active[key] = count + 1, undo


@torch.compiler.disable  # type: ignore[untyped-decorator]
def release(key: Any) -> None:
    """Remove a user of a patch; the last user undoes it."""
    with _lock:
        count, undo = _active.pop(key)
        if count > 1:
            _active[key] = count - 1, undo
        else:
            undo.close()


@contextmanager
def applied(key: Any, apply: Callable[[], ExitStack]) -> Iterator[None]:
    """Apply a patch inside a `with` block."""
    acquire(key, apply)
    try:
        yield
    finally:
        release(key)


def lookups(replacements: dict[str, Any], mask_lookup: Any) -> tuple[Any, Callable[[], ExitStack]]:
    """The patch of the lookups of attention functions (by method name) and of mask functions."""

    def apply() -> ExitStack:
        undo = ExitStack()
        for owner, name, function in (
            *((AttentionInterface, name, function) for name, function in replacements.items()),
            (AttentionMaskInterface, "__getitem__", mask_lookup),
        ):
            if name in vars(owner):
                undo.callback(setattr, owner, name, vars(owner)[name])
            else:
                undo.callback(delattr, owner, name)
            setattr(owner, name, function)
        return undo

    return "lookups", apply


def generate_methods(
    wrappers: Mapping[str, Callable[[Callable[..., Any]], Any]],
) -> tuple[Any, Callable[[], ExitStack]]:
    """The patch of methods of `GenerationMixin`, each by a function of the original."""
    return "generate", partial(_replace_methods, GenerationMixin, wrappers)


def cache_methods(
    cache_class: type, wrappers: Mapping[str, Callable[[Callable[..., Any]], Any]]
) -> tuple[Any, Callable[[], ExitStack]]:
    """The patch of those of these methods that a class of KV caches has."""
    present = {name: make for name, make in wrappers.items() if hasattr(cache_class, name)}
    return ("cache", cache_class), partial(_replace_methods, cache_class, present)


class _Compiled(threading.local):
    next_call = False
    """Whether the next compiled function of this thread runs compiled."""


_compiled = _Compiled()


def _force_eager() -> ExitStack:
    undo, original = ExitStack(), eval_frame._callback_from_stance

    def callback(callback: Any) -> Any:
        if not _compiled.next_call:
            return original(callback)
        _compiled.next_call = False
        return callback

    undo.enter_context(torch.compiler.set_stance("force_eager"))
    undo.callback(setattr, eval_frame, "_callback_from_stance", original)
    eval_frame._callback_from_stance = callback
    return undo


UNCOMPILED = "compiler stance", _force_eager
"""The patch that runs compiled models eagerly, because a compiled graph skips hooks."""


@contextmanager
def one_compiled_call() -> Iterator[None]:
    """Have the next compiled function of this thread run compiled in spite of the patch."""
    _compiled.next_call = True
    try:
        yield
    finally:
        _compiled.next_call = False


def _replace_methods(
    owner: type, wrappers: Mapping[str, Callable[[Callable[..., Any]], Any]]
) -> ExitStack:
    undo = ExitStack()
    for name, make in wrappers.items():
        _replace_method(undo, owner, name, make)
    return undo


def _replace_method(
    undo: ExitStack, owner: type, name: str, make: Callable[[Callable[..., Any]], Any]
) -> None:
    """Replace a method by `make(original)` until undone.

    Callers may keep the new method, so it must work after that too. A patch that other code applied
    on top stays.
    """
    original, defined_here = getattr(owner, name), name in vars(owner)
    replacement = wraps(original)(make(original))

    def restore() -> None:
        if vars(owner).get(name) is not replacement:
            return
        if defined_here:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    setattr(owner, name, replacement)
    undo.callback(restore)
