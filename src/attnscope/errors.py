"""Every error that attnscope raises on purpose.

    AttnscopeError
    ├── InputError          a value from outside is wrong (also a ValueError)
    ├── ModelError          this model cannot be watched or loaded
    ├── ScopeError          results were read in the wrong order, or do not exist
    └── ConservationError   the attention weights do not add up: a bug, never shown as a result

A message names the bad value, lists the good ones and says what to do. The command line prints
the message alone; a traceback means a bug. Programs and tests read `code` and `values`, which
stay the same when the wording of a message changes.
"""

import re
from collections.abc import Iterable


class AttnscopeError(Exception):
    """The base class: `except AttnscopeError` catches everything attnscope raises on purpose.

    `code` is a stable name such as "unknown-layer"; `values` holds the offending values, which
    are attributes of the error too.
    """

    code = "error"

    def __init__(self, message: str = "", *, code: str | None = None, **values: object):
        super().__init__(message)
        if code is not None:
            self.code = code
        self.values = values
        self.__dict__.update(values)


class AttnscopeWarning(UserWarning):
    """What a user should know and may be right about; the command line prints it in one line."""


class InputError(AttnscopeError, ValueError):
    """A value from outside is wrong: an option, a file, a tensor of the wrong shape."""

    code = "bad-input"


class ModelError(AttnscopeError):
    """A model that cannot be watched or loaded, with the reason and what would work."""

    code = "unsupported-model"


class ScopeError(AttnscopeError):
    """Results were read in the wrong order, or were never measured."""

    code = "not-available"


class ConservationError(AttnscopeError):
    """Attention did not add up to the number of queries. Never shown as a result."""

    code = "conservation"


def unknown(what: str, value: object, known: Iterable[object]) -> InputError:
    """The error for a value outside a known set: names it and lists the good ones."""
    known = list(known)
    return InputError(
        f"unknown {what} {value!r}; known: {', '.join(map(str, known))}",
        code="unknown-" + re.sub(r"\W+", "-", what).strip("-"),
        value=value,
        known=known,
    )
