"""The views that can still be looked at: so many, and so much memory. Must not know HTTP."""

import threading
from collections import OrderedDict

from attnscope.web.jobs import GoneError
from attnscope.web.views import View

VIEWS, VIEW_BYTES = 24, 1 << 30
"""How many views are remembered, and how much memory they may hold."""


class ViewCache:
    """The views that can still be looked at, oldest forgotten first."""

    def __init__(self) -> None:
        self._views: OrderedDict[str, View] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, view: View) -> None:
        """Remember a view, or that it has grown."""
        with self._lock:
            self._views[view.id] = view
            held = sum(each.bytes for each in self._views.values())
            while len(self._views) > VIEWS or (held > VIEW_BYTES and len(self._views) > 1):
                held -= self._views.popitem(last=False)[1].bytes
            # Queries and keys are the larger part: only the newest few views hold them.
            for old in list(self._views.values())[:-3]:
                old.scope = None
                old.by_layer.clear()

    def get(self, id: str) -> View:
        """One that is still remembered."""
        with self._lock:
            if id not in self._views:
                raise GoneError("this view is no longer remembered: measure the prompt again")
            self._views.move_to_end(id)
            return self._views[id]
