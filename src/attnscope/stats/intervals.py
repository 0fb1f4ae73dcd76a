"""Computes confidence intervals of means and of differences of means, for many columns at once.

A sample is float [n units, m columns]; a nan is left out of its column. The interval is the hull of
two intervals:

- Student's t is accurate for symmetric data, even heavy-tailed, but too short for skewed data;
- t with Hall's correction for skewness (Hall 1992, JRSS B 54) is accurate for skewed data, but too
  short for heavy tails. Small samples underestimate skewness, so the estimate is enlarged, for
  tests more than for intervals.

docs/statistics.md has the table of coverage, with the bootstraps that were rejected. Below
`MINIMUM` units, or without variance, the interval is nan.

An interval is marked as unreliable if a few units decide it: few units are informative, the sample
is very skewed, or the BCa bootstrap disagrees with Student's t.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from attnscope.stats.arrays import Floats, as_columns, check, informative_units, two_samples
from attnscope.stats.bootstrap import quantiles, quantiles_unpaired

Bools = NDArray[np.bool_]

MINIMUM = 6
"""Minimum number of units of an interval or a p-value: with 5 units the smallest p is 0.0625."""
# If BCa and t differ by more than this share of t's half width, the interval is unreliable.
APART = 0.35
SKEWED = 0.3
"""If the skewness of a mean is larger, its interval is marked as unreliable. The skewness of the
values is then above 1 for 12 units, 2.4 for 64."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """One interval per column [m]; nan if there is none."""

    low: Floats
    high: Floats
    unreliable: Bools
    """Coverage may be below the level: fewer than `MINIMUM` units are informative, or the skewness
    of the mean exceeds `SKEWED`, or BCa and Student's t differ by more than `APART` of t's half
    width."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Estimate, standard error, skewness and degrees of freedom, by column [m]."""

    estimate: Floats
    error: Floats
    """Standard error; 0 if all values are equal."""
    skew: Floats
    """Skewness of the estimate: that of the n units over sqrt(n)."""
    usual: Floats
    """Skewness corrected for small samples (Joanes and Gill 1998)."""
    careful: Floats
    """A larger estimate, for tests: for very skewed values the usual correction is too small."""
    degrees: Floats
    """Degrees of freedom."""


def intervals(
    samples: ArrayLike,
    *,
    degrees: ArrayLike | None = None,
    informative: ArrayLike | None = None,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Intervals:
    """The interval of each column's mean. Default `degrees` of freedom: n - 1; default
    `informative`: the result of `informative_units`."""
    x = as_columns(samples)
    check(level, resamples)
    estimated = moments(x, degrees)
    few = (~np.isnan(x)).sum(0) < MINIMUM
    some = informative_units(x) if informative is None else np.asarray(informative)
    bootstrap = quantiles(x, estimated.degrees, level, resamples, seed)
    return _marked(estimated, few, some, bootstrap, level)


def intervals_unpaired(
    first: ArrayLike,
    second: ArrayLike,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Intervals:
    """Intervals of the difference of two independent samples' means, second minus first."""
    a, b = two_samples(first, second)
    check(level, resamples)
    estimated = moments_unpaired(a, b)
    few = np.minimum((~np.isnan(a)).sum(0), (~np.isnan(b)).sum(0)) < MINIMUM
    some = np.minimum(informative_units(a), informative_units(b))
    spread = (estimated.estimate, estimated.error, estimated.degrees)
    bootstrap = quantiles_unpaired(a, b, spread, level, resamples, seed)
    return _marked(estimated, few, some, bootstrap, level)


def moments(samples: ArrayLike, degrees: ArrayLike | None = None) -> Moments:
    """Moments of the mean of each column."""
    x = as_columns(samples)
    n, mean, squares, cubes = _sums(x)
    free = n - 1 if degrees is None else np.broadcast_to(np.asarray(degrees, float), n.shape)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where((n > 1) & (free > 0), np.sqrt(squares / n / (n - 1)), np.nan)
        skew = np.where(squares > 0, cubes / squares**1.5, 0.0)
    free = np.where(free > 0, free, np.nan)
    return Moments(mean, error, skew, skew * _usual(n), skew * _careful(n), free)


def moments_unpaired(first: ArrayLike, second: ArrayLike) -> Moments:
    """Moments of the difference of two independent means, with Welch's degrees of freedom."""
    a, b = two_samples(first, second)
    (n_a, mean_a, squares_a, cubes_a), (n_b, mean_b, squares_b, cubes_b) = _sums(a), _sums(b)
    with np.errstate(invalid="ignore", divide="ignore"):
        of_a, of_b = squares_a / n_a / (n_a - 1), squares_b / n_b / (n_b - 1)
        error = np.where((n_a > 1) & (n_b > 1), np.sqrt(of_a + of_b), np.nan)
        plain = squares_a / n_a**2 + squares_b / n_b**2
        third_a, third_b = cubes_a / n_a**3, cubes_b / n_b**3
        skew, usual, careful = (
            np.where(plain > 0, (third_b * by(n_b) - third_a * by(n_a)) / plain**1.5, 0.0)
            for by in (np.ones_like, _usual, _careful)
        )
        degrees = (of_a + of_b) ** 2 / (of_a**2 / (n_a - 1) + of_b**2 / (n_b - 1))
    degrees = np.where(error > 0, degrees, n_a + n_b - 2)
    return Moments(mean_b - mean_a, error, skew, usual, careful, degrees)


def t_interval(estimated: Moments, level: float = 0.95) -> tuple[Floats, Floats]:
    """Student's t interval."""
    reach = stats.t.isf((1 - level) / 2, estimated.degrees) * estimated.error
    return estimated.estimate - reach, estimated.estimate + reach


def skewed_interval(estimated: Moments, level: float = 0.95) -> tuple[Floats, Floats]:
    """Student's t interval, corrected for skewness."""
    reach = np.asarray(stats.t.isf((1 - level) / 2, estimated.degrees))
    low, high = (_back(z, estimated.usual) for z in (reach, -reach))
    return estimated.estimate - estimated.error * low, estimated.estimate - estimated.error * high


def hull(estimated: Moments, level: float = 0.95) -> tuple[Floats, Floats]:
    """The smallest interval that contains both intervals."""
    plain, skewed = t_interval(estimated, level), skewed_interval(estimated, level)
    return np.minimum(plain[0], skewed[0]), np.maximum(plain[1], skewed[1])


def two_sided(estimated: Moments, null: float | Floats = 0.0) -> Floats:
    """p of the estimate against a value, by Student's t with the larger correction for skewness
    (`careful`); nan without variance."""
    with np.errstate(invalid="ignore", divide="ignore"):
        t = np.where(estimated.error > 0, (estimated.estimate - null) / estimated.error, np.nan)
    return np.asarray(2 * stats.t.sf(np.abs(_forth(t, estimated.careful)), estimated.degrees))


def one_sided(estimated: Moments, null: float | Floats, direction: str) -> Floats:
    """p for the estimate being "less" or "more" than a value: the larger of Student's t and the
    same corrected for skewness."""
    sign = -1.0 if direction == "less" else 1.0
    with np.errstate(invalid="ignore", divide="ignore"):
        t = np.where(estimated.error > 0, (estimated.estimate - null) / estimated.error, np.nan)
    skewed = _forth(t, estimated.careful)
    least = np.minimum(sign * t, sign * skewed)  # the smaller t has the larger p
    return np.asarray(stats.t.sf(least, estimated.degrees))


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


def _usual(n: Floats) -> Floats:
    """Factor of the small-sample correction of skewness."""
    n = np.maximum(n, 3.0)
    return np.asarray(np.sqrt(n * (n - 1)) / (n - 2))


def _careful(n: Floats) -> Floats:
    """Factor of skewness for tests, chosen with the tables of docs/statistics.md."""
    return _usual(n) * (1 + 5 / np.maximum(n, 3.0))


def _forth(t: Floats, skew: Floats) -> Floats:
    """Hall's monotone cubic transformation, which makes a skewed t nearly symmetric."""
    return np.asarray(t + skew * t**2 / 3 + skew**2 * t**3 / 27 + skew / 6)


def _back(y: Floats, skew: Floats) -> Floats:
    """The inverse of `_forth`."""
    some = np.abs(skew) > 1e-6
    safe = np.where(some, skew, 1.0)
    cubic = 3 / safe * (np.cbrt(1 + safe * (y - safe / 6)) - 1)
    return np.where(some, cubic, y - skew / 6 - skew * y**2 / 3)


def _marked(
    estimated: Moments,
    few: Bools,
    informative: NDArray[np.int64],
    bootstrap: tuple[Floats, Floats],
    level: float,
) -> Intervals:
    plain = t_interval(estimated, level)
    none = few | ~(estimated.error > 0)
    low, high = (np.where(none, np.nan, end) for end in hull(estimated, level))
    with np.errstate(invalid="ignore"):
        disagree = np.maximum(*(np.abs(b - t) for b, t in zip(bootstrap, plain, strict=True)))
        disagree = disagree > APART * (plain[1] - plain[0]) / 2
    dominated = disagree | (np.abs(estimated.skew) > SKEWED) | (informative < MINIMUM)
    return Intervals(low, high, ~none & dominated)
