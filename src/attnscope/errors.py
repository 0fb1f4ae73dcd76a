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
from typing import TypeGuard


class AttnscopeError(Exception):
    """The base class of all errors that attnscope raises on purpose.

    Args:
        message: Names the wrong value, lists the right ones and says what to do.
        code: A stable name such as "unknown-layer"; default: that of the class.
        **values: The wrong values by name. They are in `values`, and attributes of the error.

    Examples:
        >>> import torch, attnscope
        >>> try:
        ...     attnscope.from_tensors(torch.randn(2, 3), torch.randn(2, 3))
        ... except attnscope.AttnscopeError as error:
        ...     print(error.code, error.values)
        wrong-shape {'argument': 'q', 'got': 'float32 [2, 3]'}
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


def bad_path(path: object, problem: str, code: str, **values: object) -> ModelError:
    """The error for a file or folder of a model: names it and its problem."""
    return ModelError(f"{str(path)!r} {problem}", code=code, path=str(path), **values)


def is_int(value: object, low: int = 0) -> TypeGuard[int]:
    """Whether a value is a whole number of at least `low`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def check_int(argument: str, value: object, what: str, low: int = 0) -> None:
    """Refuse a value that is no whole number of at least `low`; `what` says what it counts."""
    if not is_int(value, low):
        raise InputError(
            f"{argument}={value!r} must be a whole number from {low}: {what}",
            code="bad-number",
            argument=argument,
            value=value,
        )


def describe(value: object) -> str:
    """The dtype and shape of a tensor or array as a message shows them; else the class."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return type(value).__name__
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def wrong_shape(argument: str, expected: str, value: object) -> InputError:
    """The error for a tensor or array of the wrong shape or dtype."""
    got = describe(value)
    return InputError(
        f"{argument} must be {expected}; got {got}", code="wrong-shape", argument=argument, got=got
    )


def out_of_range(argument: str, allowed: str, low: float, high: float) -> InputError:
    """The error for numbers outside the `allowed` range, with their smallest and largest."""
    return InputError(
        f"{argument} must lie {allowed}; got {low} … {high}",
        code="out-of-range",
        argument=argument,
        value=[low, high],
    )


def missing_package(what: str, package: str, extra: str) -> InputError:
    """The error for an optional package that is not installed."""
    return InputError(
        f"{what} needs the package {package}: pip install 'attnscope[{extra}]'",
        code="missing-package",
        package=package,
    )
