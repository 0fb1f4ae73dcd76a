"""Applies reference-counted patches to the process: each once, undone with its last user.

Blocks may end in any order and in any thread.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

_lock = threading.RLock()
_active: dict[Any, tuple[int, ExitStack]] = {}
"""By key: how many users a patch has, and how to undo it."""


def acquire(key: Any, apply: Callable[[], ExitStack]) -> None:
    """Add a user of a patch; the first user applies it."""
    with _lock:
        count, undo = _active[key] if key in _active else (0, apply())
        _active[key] = count + 1, undo


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


def _force_eager() -> ExitStack:
    undo = ExitStack()
    undo.enter_context(torch.compiler.set_stance("force_eager"))
    return undo


UNCOMPILED = "compiler stance", _force_eager
"""The patch that runs compiled models eagerly, because a compiled graph skips hooks."""


def uncompiled() -> AbstractContextManager[None]:
    """Apply `UNCOMPILED` inside a `with` block."""
    return applied(*UNCOMPILED)


def replace_method(
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
