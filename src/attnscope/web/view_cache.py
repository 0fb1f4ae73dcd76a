"""A cache of the newest views, bounded in number and memory."""

import threading
from collections import OrderedDict

from attnscope.web.jobs import GoneError
from attnscope.web.views import View

VIEWS, VIEW_BYTES = 24, 1 << 30
"""The most views in the cache, and the most bytes that they take together."""


class ViewCache:
    """The newest views; the oldest is dropped first."""

    def __init__(self) -> None:
        self._views: OrderedDict[str, View] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, view: View) -> None:
        """Add a view, or count its memory again after it has grown."""
        with self._lock:
            self._views[view.id] = view
            held = sum(each.bytes for each in self._views.values())
            while len(self._views) > VIEWS or (held > VIEW_BYTES and len(self._views) > 1):
                held -= self._views.popitem(last=False)[1].bytes
            # Queries and keys take the most memory, so only the newest views keep them.
            for old in list(self._views.values())[:-3]:
                old.scope = None
                old.by_layer.clear()

    def get(self, id: str) -> View:
        """The view with this id."""
        with self._lock:
            if id not in self._views:
                raise GoneError(
                    f"the server no longer has the view {id!r}; measure the prompt again",
                    code="unknown-view",
                    view=id,
                )
            self._views.move_to_end(id)
            return self._views[id]
