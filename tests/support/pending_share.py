"""`watching`: a watch whose pending calls may use another share of the free memory.

With share 0 each call is measured at once, so it is the reference for calls that are measured
together.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attnscope
from attnscope.scope import pending


@contextmanager
def watching(model: Any, *, share: float, **options: Any) -> Iterator[attnscope.Scope]:
    before, pending.MAX_SHARE = pending.MAX_SHARE, share
    try:
        with attnscope.watch(model, **options) as scope:
            yield scope
    finally:
        pending.MAX_SHARE = before
