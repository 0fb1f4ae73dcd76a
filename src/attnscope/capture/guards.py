"""Caches that must stay as they are while watched. Must not know what is measured."""

from typing import Any

from attnscope.errors import ScopeError

# A cache whose rows are shuffled (beam search) or cut (assisted generation) between steps no longer
# matches the sums so far. Never a wrong number: say so at once.
_SHUFFLES = ("reorder_cache", "crop", "batch_select_indices", "batch_repeat_interleave")
_guards: dict[int, set[Any]] = {}
"""Who guards a cache, by its id: several watches may, and leave in any order."""


def guard(cache: Any, who: Any) -> None:
    """Refuse whatever shuffles a cache, until the last who guards it lets go."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ScopeError(
            "the cache was reordered or cut while watched, so attention can no longer be "
            "added up by sequence; generate with num_beams=1 and without an assistant model"
        )

    if cache is None:
        return
    _guards.setdefault(id(cache), set()).add(who)
    for method in _SHUFFLES:
        if hasattr(cache, method):
            setattr(cache, method, refuse)


def release(cache: Any, who: Any) -> None:
    """Give a cache its own methods back, once nobody guards it."""
    left = _guards.get(id(cache), set())
    left.discard(who)
    if cache is not None and not left:
        _guards.pop(id(cache), None)
        for method in _SHUFFLES:
            vars(cache).pop(method, None)
