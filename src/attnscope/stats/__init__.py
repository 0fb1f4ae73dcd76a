"""Is it real? Comparisons over prompts, with intervals, tests, claims and their sensitivity.

Right of the wall: reads tables, never loads a model.

Called, `attnscope.stats(q, k, …)` is what stands under this name in the package: the numbers of a
scope for plain tensors (`attnscope.capture.from_tensors`). A room and a function share it, because
importing any module of a room puts the room where the function would be.
"""

import sys
from types import ModuleType
from typing import Any

__all__: list[str] = []


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from attnscope.capture.from_tensors import stats

        return stats(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
