"""Caches that must stay as they are while watched. Must not know what is measured."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from threading import Lock
from typing import Any

from attnscope.capture import patches
from attnscope.errors import ScopeError

# A cache whose rows are shuffled (beam search) or cut (assisted generation) between steps no longer
# matches the sums so far. Never a wrong number: say so at once.
_MUTATORS = ("reorder_cache", "crop", "batch_select_indices", "batch_repeat_interleave")
_owners: dict[int, set[Any]] = {}
"""Who guards a cache, by its id: several watches may, and leave in any order."""
_lock = Lock()


def guard_cache(cache: Any, owner: Any) -> None:
    """Refuse whatever shuffles a cache, until the last who guards it lets go.

    Its class is patched and not the cache itself: copies of it stay free.
    """
    if cache is None:
        return
    patches.acquire(("cache", type(cache)), partial(_patch, type(cache)))
    with _lock:
        _owners.setdefault(id(cache), set()).add(owner)


def unguard_cache(cache: Any, owner: Any) -> None:
    """Give a cache its own methods back, once nobody guards it."""
    if cache is None:
        return
    with _lock:
        owners = _owners[id(cache)]
        owners.discard(owner)
        if not owners:
            del _owners[id(cache)]
    patches.release(("cache", type(cache)))


def _patch(cache_class: type) -> ExitStack:
    undo = ExitStack()
    for method in _MUTATORS:
        if hasattr(cache_class, method):
            patches.replace_method(undo, cache_class, method, partial(_guarded, method))
    return undo


def _guarded(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(cache: Any, *args: Any, **kwargs: Any) -> Any:
        if id(cache) not in _owners:
            return original(cache, *args, **kwargs)
        raise ScopeError(
            f"the cache was reordered or cut while watched ({method}), so attention can no longer "
            "be added up by sequence; generate with num_beams=1 and without an assistant model",
            code="cache-changed",
            method=method,
        )

    return refuse
