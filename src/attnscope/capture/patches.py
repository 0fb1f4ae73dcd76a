"""Changes to the whole process: each is made once for all users, and undone with the last of them.

Blocks may be left in any order and from any thread. Must not know what the changes are for.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

_lock = threading.RLock()
_active: dict[Any, tuple[int, ExitStack]] = {}
"""By key: how many users a change has, and how to undo it."""


def acquire(key: Any, apply: Callable[[], ExitStack]) -> None:
    """One more user of a change; the first one makes it."""
    with _lock:
        count, undo = _active[key] if key in _active else (0, apply())
        _active[key] = count + 1, undo


def release(key: Any) -> None:
    """One user less; with the last one the change is undone."""
    with _lock:
        count, undo = _active.pop(key)
        if count > 1:
            _active[key] = count - 1, undo
        else:
            undo.close()


@contextmanager
def applied(key: Any, apply: Callable[[], ExitStack]) -> Iterator[None]:
    """A change, inside a `with` block."""
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
"""Compiled parts of models run as written: a compiled graph skips hooks."""


def uncompiled() -> AbstractContextManager[None]:
    """`UNCOMPILED`, inside a `with` block."""
    return applied(*UNCOMPILED)


def replace_method(
    undo: ExitStack, owner: type, name: str, make: Callable[[Callable[..., Any]], Any]
) -> None:
    """Put `make(original)` in the place of a method until undone.

    Callers may hold the new method after that, so it has to work for ever. A patch that others put
    above it meanwhile stays.
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
