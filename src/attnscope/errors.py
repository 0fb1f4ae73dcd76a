"""Every error attnscope raises on purpose, and nothing else.

    AttnscopeError
    ├── InputError          a value from outside is wrong (also a ValueError)
    ├── ModelError          this model cannot be watched or loaded
    ├── ScopeError          results were asked for in the wrong order, or do not exist
    └── ConservationError   the numbers do not add up: a bug of ours, never shown as a result

A message names the bad value, lists the good ones and says what to do. The command line prints
the message alone; a traceback means a bug.
"""

from collections.abc import Iterable


class AttnscopeError(Exception):
    """The root: `except AttnscopeError` catches everything attnscope raises on purpose."""


class AttnscopeWarning(UserWarning):
    """What a user should know and may be right about; the command line prints it in one line."""


class InputError(AttnscopeError, ValueError):
    """A value from outside is wrong: an option, a file, a tensor of the wrong shape."""


class ModelError(AttnscopeError):
    """A model that cannot be watched or loaded, with the reason and what would work."""


class ScopeError(AttnscopeError):
    """Results were asked for in the wrong order, or were never measured."""


class ConservationError(AttnscopeError):
    """Attention did not add up to the number of queries. Never shown as a result."""


def unknown(what: str, value: object, known: Iterable[object]) -> InputError:
    """The error for a value outside a known set: names it and lists the good ones."""
    return InputError(f"unknown {what} {value!r}; known: {', '.join(map(str, known))}")
