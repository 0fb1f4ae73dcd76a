"""Refuses changes to a KV cache while its model is watched."""

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

from attnscope.errors import ScopeError
from attnscope.interception import patches

# Beam search reorders the rows of a cache, and assisted generation crops it. The sums so far would
# then belong to other sequences, so these methods raise an error.
_MUTATORS = ("reorder_cache", "crop", "batch_select_indices", "batch_repeat_interleave")
_owners: dict[int, set[Any]] = {}
"""The watches that guard a cache, by the id of the cache. They may end in any order."""
_lock = Lock()


def guard_cache(cache: Any, owner: Any) -> None:
    """Refuse methods that reorder or crop a cache, until all its owners unguard it.

    Patches the class, not the cache, so that a copy of the cache is not guarded.
    """
    if cache is None:
        return
    wrappers = {method: partial(_guarded, method) for method in _MUTATORS}
    patches.acquire(*patches.cache_methods(type(cache), wrappers))
    with _lock:
        _owners.setdefault(id(cache), set()).add(owner)


def unguard_cache(cache: Any, owner: Any) -> None:
    """Remove one owner. The cache has its original methods again after the last one."""
    if cache is None:
        return
    with _lock:
        owners = _owners[id(cache)]
        owners.discard(owner)
        if not owners:
            del _owners[id(cache)]
    patches.release(("cache", type(cache)))


def _guarded(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(cache: Any, *args: Any, **kwargs: Any) -> Any:
        if id(cache) not in _owners:
            return original(cache, *args, **kwargs)
        raise ScopeError(
            f"{method} reorders or crops the KV cache of a watched model, so attention can no "
            "longer be summed by sequence; generate with num_beams=1 and without an assistant "
            "model",
            code="cache-changed",
            method=method,
        )

    return refuse
