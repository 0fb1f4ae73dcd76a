"""attnscope tells where a language model's attention goes.

Importing this package imports nothing heavy: each public name is fetched from its module the
first time it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnscope.capture.from_tensors import stats as stats
    from attnscope.capture.record import record as record
    from attnscope.capture.scope import Scope as Scope
    from attnscope.capture.watch import watch as watch
    from attnscope.errors import AttnscopeError as AttnscopeError
    from attnscope.interventions.arm import arm as arm
    from attnscope.interventions.knockout import knockout as knockout
    from attnscope.interventions.steer import steer as steer
    from attnscope.loading import load as load
    from attnscope.run.store import open_run as open_run

__version__ = "0.1.0.dev0"

_HOME = {
    "AttnscopeError": "attnscope.errors",
    "Scope": "attnscope.capture.scope",
    "arm": "attnscope.interventions.arm",
    "knockout": "attnscope.interventions.knockout",
    "load": "attnscope.loading",
    "open_run": "attnscope.run.store",
    "record": "attnscope.capture.record",
    "stats": "attnscope.stats",
    "steer": "attnscope.interventions.steer",
    "watch": "attnscope.capture.watch",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'attnscope' has no attribute {name!r}; it has {__all__}")
    home = import_module(_HOME[name])
    return home if name == "stats" else getattr(home, name)  # a room that can be called


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
