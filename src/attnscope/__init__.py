"""attnscope measures where the attention of a transformer language model goes.

`import attnscope` loads no heavy package: each public name is imported from its module when it is
first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnscope.activations.record import record as record
    from attnscope.errors import AttnscopeError as AttnscopeError
    from attnscope.integrations.trainer import TrainerCallback as TrainerCallback
    from attnscope.interception.intercept import intercept as intercept
    from attnscope.interventions.arm import arm as arm
    from attnscope.interventions.effect import effect as effect
    from attnscope.interventions.knockout import knockout as knockout
    from attnscope.interventions.steer import steer as steer
    from attnscope.loading import load as load
    from attnscope.run.store import open_run as open_run
    from attnscope.scope.from_tensors import from_tensors as from_tensors
    from attnscope.scope.scope import Scope as Scope
    from attnscope.scope.watch import watch as watch

__version__ = "0.1.0.dev0"

_MODULES = {
    "AttnscopeError": "attnscope.errors",
    "Scope": "attnscope.scope.scope",
    "TrainerCallback": "attnscope.integrations.trainer",
    "arm": "attnscope.interventions.arm",
    "effect": "attnscope.interventions.effect",
    "from_tensors": "attnscope.scope.from_tensors",
    "intercept": "attnscope.interception.intercept",
    "knockout": "attnscope.interventions.knockout",
    "load": "attnscope.loading",
    "open_run": "attnscope.run.store",
    "record": "attnscope.activations.record",
    "steer": "attnscope.interventions.steer",
    "watch": "attnscope.scope.watch",
}
"""Public name → the module that defines it."""

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'attnscope' has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return ["__version__", *sorted(__all__)]
