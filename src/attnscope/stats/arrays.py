"""Checks and helpers for samples: float [n units, m columns], nan for an undefined value."""

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.errors import InputError

Floats = NDArray[np.float64]

# Numbers in memory at a time (64 MiB), for any number of columns, units and resamples.
HELD = 2**23
# Sums of the same numbers in another order differ by rounding; up to this they count as equal.
SAME = 1e-12


def as_columns(samples: ArrayLike) -> Floats:
    """Samples as [units, columns]; infinite values are refused."""
    x = np.asarray(samples, dtype=float)
    if x.ndim == 1:
        x = x[:, None]
    if x.ndim != 2:
        raise InputError(
            f"samples have the shape [prompts, columns]; got {list(x.shape)}",
            code="bad-shape",
            shape=list(x.shape),
        )
    if np.isinf(x).any():
        raise InputError(
            "samples must not be infinite; use nan for an undefined value", code="infinite-value"
        )
    return x


def two_samples(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    """Two samples of the same columns."""
    a, b = as_columns(first), as_columns(second)
    if a.shape[1] != b.shape[1]:
        raise InputError(
            f"two samples need the same number of columns; got {a.shape[1]} and {b.shape[1]}",
            code="bad-shape",
            columns=(a.shape[1], b.shape[1]),
        )
    return a, b


def out_of_range(name: str, value: object, allowed: str) -> InputError:
    """The error for a setting outside its range."""
    return InputError(
        f"{name}={value!r} is out of range; allowed: {allowed}",
        code="out-of-range",
        name=name,
        value=value,
    )


def check(level: float, resamples: int) -> None:
    """Refuse a confidence level or a number of resamples that is out of range."""
    if not 0 < level < 1:
        raise out_of_range("level", level, "between 0 and 1, for example 0.95")
    if resamples < 100:
        raise out_of_range("resamples", resamples, "100 or more")


def informative_units(samples: ArrayLike) -> NDArray[np.int64]:
    """Number of informative units of each column. If more than half of the units share one value,
    only the others count."""
    x = np.sort(as_columns(samples), axis=0)  # nan last, and no two of them are equal
    n = (~np.isnan(x)).sum(0)
    longest, current = np.ones(x.shape[1], dtype=np.int64), np.ones(x.shape[1], dtype=np.int64)
    for before, value in itertools.pairwise(x):
        current = np.where(value == before, current + 1, 1)
        longest = np.maximum(longest, current)
    return np.asarray(np.where(2 * longest > n, n - longest, n), dtype=np.int64)


def mean_of(x: Floats) -> Floats:
    """Mean of each column over the defined values; nan if there are none."""
    n = (~np.isnan(x)).sum(0)
    return np.where(n > 0, np.nansum(x, 0) / np.maximum(n, 1), np.nan)


def blocks(total: int, size: int) -> Iterator[int]:
    """Split `total` into blocks of at most `size`."""
    for at in range(0, total, size):
        yield min(size, total - at)
