"""Intervals of means and of differences of means, for many columns at once. Knows arrays only: no
tables, no heads, no models.

A sample is float [n units, m columns]; nan is a unit without a value in that column: it is left
out there, and there alone. The interval is the hull of two that fail in different places:

- Student's t holds for symmetric data, with heavy tails too, and is too short for skewed ones;
- the same with Hall's correction for skewness (Hall 1992, JRSS B 54) holds for skewed data and is
  too short for heavy tails.

docs/statistics.md has the table of coverage by which they were chosen, with the bootstraps that
were not. Below `MINIMUM` units, and where no two values differ, there is no interval: nan.

BCa, a bootstrap, stands beside: where it and Student's t disagree, a few units dominate, and the
interval is marked as doubtful. All columns see the same resampled units, so that a resample is a
row of counts and the means of all columns are one matrix product. Given the same seed, `bca` is
scipy's `bootstrap`, at the level that `expanded` gives (Hesterberg 2015, arXiv 1411.5279).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from attnscope.errors import InputError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MINIMUM = 6
"""Units that an interval or a p-value needs: of 5 signs, the rarest pattern and its opposite have
p = 0.0625, and no interval from so few covers what it says."""
# Numbers held at a time (64 MiB), whatever the number of columns, units and resamples.
HELD = 2**23
# Sums of the same numbers in another order differ by rounding; as far as this they are equal.
SAME = 1e-12
# BCa and t may differ by this share of t's half width before an interval counts as doubtful.
APART = 0.35


@dataclass(frozen=True, slots=True)
class Intervals:
    """One interval per column [m]; nan where there is none."""

    low: Floats
    high: Floats
    doubtful: Bools
    """BCa and Student's t disagree by more than `APART` of t's half width: a few units dominate,
    and coverage is not what the level says."""


@dataclass(frozen=True, slots=True)
class Moments:
    """What the closed forms need of an estimate, by column [m]."""

    estimate: Floats
    error: Floats
    """Standard error; 0 where no two values differ."""
    skew: Floats
    """Skewness of the estimate: of n units, theirs over sqrt(n)."""
    degrees: Floats
    """Of freedom."""


def intervals(
    samples: ArrayLike,
    *,
    degrees: ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Intervals:
    """The interval of each column's mean. `degrees` of freedom are n - 1 unless said."""
    x = as_columns(samples)
    check(level, resamples)
    found = moments(x, degrees)
    few = (~np.isnan(x)).sum(0) < MINIMUM
    return _hull(found, few, _bootstrap(x, found.degrees, level, resamples, seed), level)


def intervals_unpaired(
    first: ArrayLike,
    second: ArrayLike,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Intervals:
    """The same for the difference of two independent samples' means, second less first."""
    a, b = two_samples(first, second)
    check(level, resamples)
    found = moments_unpaired(a, b)
    few = np.minimum((~np.isnan(a)).sum(0), (~np.isnan(b)).sum(0)) < MINIMUM
    return _hull(found, few, _bootstrap_unpaired(a, b, level, resamples, seed), level)


def bca(
    samples: ArrayLike,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
    expand: bool = True,
) -> tuple[Floats, Floats]:
    """Bias-corrected and accelerated bootstrap interval (Efron 1987) of each column's mean, from 2
    units on: what scipy gives, at the level `expanded` or (`expand=False`) as it is. Not what
    `intervals` gives; beside Student's t it tells which of those are doubtful.
    """
    x = as_columns(samples)
    check(level, resamples)
    degrees = np.maximum((~np.isnan(x)).sum(0) - 1.0, 1.0) if expand else None
    return _bootstrap(x, degrees, level, resamples, seed)


def expanded(level: float, n: int) -> float:
    """The level at which the quantiles of n units' bootstrap have to be taken for this one."""
    return float(1 - 2 * special.ndtr(-_reach(level, n - 1, n / (n - 1))))


def moments(samples: ArrayLike, degrees: ArrayLike | None = None) -> Moments:
    """Of the mean of each column."""
    x = as_columns(samples)
    n, mean, squares, cubes = _sums(x)
    free = n - 1 if degrees is None else np.broadcast_to(np.asarray(degrees, float), n.shape)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where((n > 1) & (free > 0), np.sqrt(squares / n / (n - 1)), np.nan)
        skew = np.where(squares > 0, cubes / squares**1.5, 0.0)
    return Moments(mean, error, skew, np.where(free > 0, free, np.nan))


def moments_unpaired(first: ArrayLike, second: ArrayLike) -> Moments:
    """Of the difference of two independent samples' means, with Welch's degrees of freedom."""
    a, b = two_samples(first, second)
    (n_a, mean_a, squares_a, cubes_a), (n_b, mean_b, squares_b, cubes_b) = _sums(a), _sums(b)
    with np.errstate(invalid="ignore", divide="ignore"):
        of_a, of_b = squares_a / n_a / (n_a - 1), squares_b / n_b / (n_b - 1)
        error = np.where((n_a > 1) & (n_b > 1), np.sqrt(of_a + of_b), np.nan)
        plain = squares_a / n_a**2 + squares_b / n_b**2
        skew = np.where(plain > 0, (cubes_b / n_b**3 - cubes_a / n_a**3) / plain**1.5, 0.0)
        degrees = (of_a + of_b) ** 2 / (of_a**2 / (n_a - 1) + of_b**2 / (n_b - 1))
    degrees = np.where(error > 0, degrees, n_a + n_b - 2)
    return Moments(mean_b - mean_a, error, skew, degrees)


def t_interval(found: Moments, level: float = 0.95) -> tuple[Floats, Floats]:
    """Student's."""
    reach = stats.t.isf((1 - level) / 2, found.degrees) * found.error
    return found.estimate - reach, found.estimate + reach


def skewed_interval(found: Moments, level: float = 0.95) -> tuple[Floats, Floats]:
    """Student's, corrected for skewness."""
    reach = np.asarray(stats.t.isf((1 - level) / 2, found.degrees))
    low, high = (_back(z, found.skew) for z in (reach, -reach))
    return found.estimate - found.error * low, found.estimate - found.error * high


def two_sided(found: Moments, null: float | Floats = 0.0) -> Floats:
    """p of the estimate against a value, by Student's t corrected for skewness; nan where nothing
    varies."""
    with np.errstate(invalid="ignore", divide="ignore"):
        t = np.where(found.error > 0, (found.estimate - null) / found.error, np.nan)
    return np.asarray(2 * stats.t.sf(np.abs(_forth(t, found.skew)), found.degrees))


def one_sided(found: Moments, null: float | Floats, direction: str) -> Floats:
    """p for the estimate being "less" or "more" than a value: the larger of Student's t and the
    same corrected for skewness."""
    sign = -1.0 if direction == "less" else 1.0
    with np.errstate(invalid="ignore", divide="ignore"):
        t = np.where(found.error > 0, (found.estimate - null) / found.error, np.nan)
    plain, corrected = (stats.t.sf(sign * z, found.degrees) for z in (t, _forth(t, found.skew)))
    return np.asarray(np.maximum(plain, corrected))


def as_columns(samples: ArrayLike) -> Floats:
    """Samples as [units, columns]; anything infinite is refused."""
    x = np.asarray(samples, dtype=float)
    if x.ndim == 1:
        x = x[:, None]
    if x.ndim != 2:
        raise InputError(f"samples are [prompts, columns]; got the shape {list(x.shape)}")
    if np.isinf(x).any():
        raise InputError("an infinite value has no mean; use nan where a value is not defined")
    return x


def two_samples(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    """Two samples of the same columns."""
    a, b = as_columns(first), as_columns(second)
    if a.shape[1] != b.shape[1]:
        raise InputError(
            f"two samples of the same columns are compared; got {a.shape[1]} and {b.shape[1]}"
        )
    return a, b


def check(level: float, resamples: int) -> None:
    """Refuse settings that say nothing."""
    if not 0 < level < 1:
        raise InputError(f"level={level!r}: the level of an interval lies between 0 and 1")
    if resamples < 100:
        raise InputError(f"resamples={resamples!r}: fewer than 100 say nothing about tails")


def blocks(total: int, size: int) -> Iterator[int]:
    """`total` in parts of at most `size`."""
    for at in range(0, total, size):
        yield min(size, total - at)


def _sums(x: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Number of values, mean, and the sums of squares and cubes about it; exactly 0 if constant."""
    known = ~np.isnan(x)
    n = known.sum(0).astype(float)
    mean = np.where(n > 0, np.where(known, x, 0.0).sum(0) / np.maximum(n, 1), np.nan)
    least = np.where(known, x, np.inf).min(0, initial=np.inf)
    most = np.where(known, x, -np.inf).max(0, initial=-np.inf)
    mean = np.where(least == most, least, mean)
    centred = np.where(known, x - mean, 0.0)
    return n, mean, (centred**2).sum(0), (centred**3).sum(0)


def _forth(t: Floats, skew: Floats) -> Floats:
    """Hall's monotone cubic: a skewed estimate's t, made nearly symmetric."""
    return np.asarray(t + skew * t**2 / 3 + skew**2 * t**3 / 27 + skew / 6)


def _back(y: Floats, skew: Floats) -> Floats:
    """The t that `_forth` takes to y."""
    some = np.abs(skew) > 1e-6
    safe = np.where(some, skew, 1.0)
    cubic = 3 / safe * (np.cbrt(1 + safe * (y - safe / 6)) - 1)
    return np.where(some, cubic, y - skew / 6 - skew * y**2 / 3)


def _hull(found: Moments, few: Bools, bootstrap: tuple[Floats, Floats], level: float) -> Intervals:
    plain, skewed = t_interval(found, level), skewed_interval(found, level)
    none = few | ~(found.error > 0)
    low = np.where(none, np.nan, np.minimum(plain[0], skewed[0]))
    high = np.where(none, np.nan, np.maximum(plain[1], skewed[1]))
    with np.errstate(invalid="ignore"):
        apart = np.maximum(*(np.abs(b - t) for b, t in zip(bootstrap, plain, strict=True)))
        doubtful = ~none & (apart > APART * (plain[1] - plain[0]) / 2)
    return Intervals(low, high, doubtful)


def _bootstrap(
    x: Floats, degrees: Floats | None, level: float, resamples: int, seed: int
) -> tuple[Floats, Floats]:
    """BCa; its quantiles are taken farther out if there are degrees of freedom."""
    low, high = np.full(x.shape[1], np.nan), np.full(x.shape[1], np.nan)
    for columns, (rows,) in _alike((x,), resamples):
        part = x[np.ix_(rows, columns)]
        n = len(part)
        if n < 2:
            continue
        mean = part.mean(0)
        centred = part - mean
        boot = _means(centred, resamples, np.random.default_rng(seed))
        reach: Any = special.ndtri((1 + level) / 2)
        if degrees is not None:
            reach = _reach(level, degrees[columns], n / (n - 1))
        squares, cubes = (centred**2).sum(0), (centred**3).sum(0)
        low[columns], high[columns] = _accelerated(mean, boot, squares, cubes, reach)
        constant = part.min(0) == part.max(0)
        low[columns[constant]] = high[columns[constant]] = np.nan
    return low, high


def _bootstrap_unpaired(
    a: Floats, b: Floats, level: float, resamples: int, seed: int
) -> tuple[Floats, Floats]:
    low, high = np.full(a.shape[1], np.nan), np.full(a.shape[1], np.nan)
    for columns, rows in _alike((a, b), resamples):
        parts = [side[np.ix_(r, columns)] for side, r in zip((a, b), rows, strict=True)]
        if min(map(len, parts)) < 2:
            continue
        found = moments_unpaired(*parts)
        centred = [part - part.mean(0) for part in parts]
        rng = np.random.default_rng(seed)
        boots = [_means(part, resamples, rng) for part in centred]
        # The moments of a mean's influence add up, each with its sample's size.
        squares = sum((d**2).sum(0) / len(d) ** 2 for d in centred)
        cubes = sum(
            sign * (d**3).sum(0) / len(d) ** 3 for sign, d in zip((-1, 1), centred, strict=True)
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            narrow = np.where(found.error > 0, found.error**2 / squares, 1.0)
        low[columns], high[columns] = _accelerated(
            found.estimate,
            boots[1] - boots[0],
            np.asarray(squares),
            np.asarray(cubes),
            _reach(level, found.degrees, narrow),
        )
    return low, high


def _alike(
    samples: tuple[Floats, ...], resamples: int
) -> Iterator[tuple[NDArray[np.intp], list[Bools]]]:
    """Columns with values for the same units, a bearable number at a time, and those units."""
    known = ~np.isnan(np.concatenate(samples))
    ends = np.cumsum([len(sample) for sample in samples])[:-1]
    _, which = np.unique(np.packbits(known, axis=0), axis=1, return_inverse=True)
    which = which.reshape(-1)
    order = np.argsort(which, kind="stable")
    width = max(1, HELD // resamples)
    for group in np.split(order, np.flatnonzero(np.diff(which[order])) + 1):
        if not len(group):
            continue
        rows = np.split(known[:, group[0]], ends)
        for at in range(0, len(group), width):
            yield group[at : at + width], rows


def _means(centred: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Means of resampled units [m, resamples]; the draws are those of scipy's `bootstrap`."""
    n, m = centred.shape
    means = np.empty((m, resamples))
    at = 0
    for size in blocks(resamples, max(1, HELD // n)):
        drawn = rng.integers(0, n, (size, n))
        drawn += np.arange(size)[:, None] * n
        counts = np.bincount(drawn.reshape(-1), minlength=size * n).reshape(size, n)
        means[:, at : at + size] = centred.T @ (counts.T / n)
        at += size
    return means


def _reach(level: float, degrees: float | Floats, narrow: float | Floats) -> Floats:
    """How far out quantiles are taken: t's, times what the bootstrap's spread falls short by."""
    return np.asarray(np.sqrt(narrow) * stats.t.isf((1 - level) / 2, degrees))


def _accelerated(
    mean: Floats, boot: Floats, squares: Floats, cubes: Floats, reach: Any
) -> tuple[Floats, Floats]:
    """BCa after Efron: `boot` [m, resamples] is the resampled means less the mean."""
    resamples = boot.shape[1]
    boot.sort(axis=1)
    # A resample that is the data in another order equals the mean but for rounding: half below.
    close = SAME * np.maximum(-boot[:, 0], boot[:, -1])
    below = np.array([np.searchsorted(b, [-c, c]) for b, c in zip(boot, close, strict=True)])
    share = below.sum(1) / (2 * resamples)
    bias = special.ndtri(share.clip(0.5 / resamples, 1 - 0.5 / resamples))
    with np.errstate(invalid="ignore"):  # constant: 0 / 0, put right by the caller
        acceleration = cubes / squares**1.5 / 6
    ends = []
    for z in (-reach, reach):
        shifted = bias + z
        at = special.ndtr(bias + shifted / (1 - acceleration * shifted)) * (resamples - 1)
        at = np.nan_to_num(at)
        whole = np.floor(at).astype(int).clip(0, resamples - 2)
        rows = np.arange(len(boot))
        left, right = boot[rows, whole], boot[rows, whole + 1]
        ends.append(left + (right - left) * (at - whole) + mean)
    return ends[0], ends[1]
