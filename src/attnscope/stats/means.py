"""Tests `b - c * a - d` against 0, prompt by prompt, for many columns at once.

One statistic gives everything: the test, the interval of the mean, the interval of the ratio of
two means (every c that the test does not reject, Fieller 1954) and equivalence (two values of c).
So a printed interval and a printed p-value always agree.

The test is Student's t and Hall's (1992) transformation of t for skewness, and it rejects if both
do. t is right for symmetric values with heavy tails, the transformation for skewed values. The
skewness estimate is the usual one for small samples (Joanes and Gill 1998). Clusters: CR2 with the
degrees of freedom of Bell and McCaffrey (2002). Two independent groups: Welch.

A sample is float [n prompts, m columns]; nan is a prompt without a value in that column.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from attnscope.measures.measure import ANY
from attnscope.stats.arrays import Floats, as_columns, two_samples
from attnscope.stats.clusters import Design, design_of

MINIMUM = 6
"""Minimum number of units: with 5 equal signs, the smallest two-sided p is 2 / 32 = 0.0625."""
STEPS = 16
Ends = tuple[float | Floats, float | Floats]
HALVINGS = 40


@dataclass(frozen=True, slots=True)
class Contrast:
    """Two samples with the same columns, ready to be tested."""

    first: Design
    second: Design
    paired: bool = True
    range_a: Ends = ANY
    range_b: Ends = ANY
    """Possible values of each side: of all columns, or one for each."""

    @property
    def mean_a(self) -> Floats:
        """Means of the first sample."""
        return self.first.mean

    @property
    def mean_b(self) -> Floats:
        """Means of the second sample."""
        return self.second.mean

    @property
    def units(self) -> NDArray[np.int64]:
        """Units with a value; of two independent groups, those of the smaller one."""
        n = self.second.units
        return n if self.paired else np.minimum(n, self.first.units)

    def at(self, c: float | Floats, d: float | Floats = 0.0) -> Tested:
        """The test of `b - c * a - d`."""
        return self._along(1.0, c, d)

    def _along(self, u: float | Floats, v: float | Floats, d: float | Floats) -> Tested:
        """The test of `u * b - v * a - d`."""
        a, b = self.first, self.second
        estimate = u * b.mean - v * a.mean - d
        if self.paired:
            parts = u * b.parts - v * a.parts
        else:
            parts = np.concatenate([u * b.parts, -v * a.parts])
        scale = np.abs(u * b.mean) + np.abs(v * a.mean) + np.abs(d)
        error = np.sqrt((parts**2).sum(0))
        error = np.where(error > 1e-12 * scale, error, 0.0)  # equal values up to rounding
        with np.errstate(invalid="ignore", divide="ignore"):
            third = np.where(error > 0, (parts**3).sum(0) / error**3, 0.0)
        skew = third * _small(self.units)
        return Tested(estimate, error, skew, self.degrees(u, v), *self._common(u, v, d))

    def degrees(self, u: float | Floats, v: float | Floats) -> Floats:
        """Degrees of freedom of `u * b - v * a`; of two independent groups Welch's."""
        a, b = self.first, self.second
        if self.paired:
            return b.degrees
        of_a, of_b = v**2 * (a.parts**2).sum(0), u**2 * (b.parts**2).sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((of_a + of_b) ** 2 / (of_a**2 / a.degrees + of_b**2 / b.degrees))

    def _common(
        self, u: float | Floats, v: float | Floats, d: float | Floats
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats, Floats, Floats]:
        """Units, informative units, the most common value, and the possible range."""
        a, b = self.first, self.second
        (low_a, high_a), (low_b, high_b) = self.range_a, self.range_b
        one = np.ones(len(b.mean))
        with np.errstate(invalid="ignore"):
            of_a = [one * (v * end) if np.any(v) else 0.0 * one for end in (low_a, high_a)]
            low = one * (u * low_b) - d - np.maximum(of_a[0], of_a[1])
            high = one * (u * high_b) - d - np.minimum(of_a[0], of_a[1])
        if not self.paired:
            informative = np.minimum(_informative(a.sums)[0], _informative(b.sums)[0])
            return self.units, informative, np.nan * one, low, high
        informative, common = _informative(u * b.sums - v * a.sums - d * b.sizes)
        single = (b.sizes <= 1).all(0)
        return b.units, informative, np.where(single, common, np.nan), low, high

    def interval(
        self, c: float = 1.0, d: float = 0.0, level: float = 0.95
    ) -> tuple[Floats, Floats]:
        """The interval of the mean of `b - c * a - d`; nan if there is none."""
        return self.at(c, d).interval(level)

    def ratio(self, d: float = 0.0, level: float = 0.95) -> tuple[Floats, Floats, Floats]:
        """(b - d) / a as a ratio of means, with its interval: every c for which the test of
        `b - c * a - d` does not reject. An end is infinite if no c on that side is rejected.
        nan if the mean of a is not above 0."""
        centre = np.arctan2(self.mean_b - d, np.where(self.mean_a > 0, self.mean_a, np.nan))
        tested = self._along(np.cos(centre), np.sin(centre), np.cos(centre) * d)
        turned = _Turned(self, centre, d)
        low, high = (turned.end(side, (1 - level) / 2) for side in (-np.pi / 2, np.pi / 2))
        positive = np.minimum(self.range_a[0], self.range_b[0] - d) >= 0
        low = np.where(positive, np.maximum(low, 0.0), low)
        decided = tested.decides(1 - level) & (tested.error > 0)
        low, high = (np.where(decided, end, np.nan) for end in (low, high))
        return np.tan(centre), low, high


class _Turned:
    """The contrast `cos(angle) * (b - d) - sin(angle) * a` for many angles, from sums of products
    of the contrast at `centre`, where its mean is 0, and the one at a right angle to it."""

    def __init__(self, contrast: Contrast, centre: Floats, d: float):
        cos, sin = np.cos(centre), np.sin(centre)
        a, b = contrast.first, contrast.second
        parts_a, parts_b = a.parts, b.parts
        if not contrast.paired:
            parts_a = np.concatenate([0 * b.parts, a.parts])
            parts_b = np.concatenate([b.parts, 0 * a.parts])
        x, y = cos * parts_b - sin * parts_a, sin * parts_b + cos * parts_a
        self.contrast, self.centre = contrast, centre
        self.mean = sin * (b.mean - d) + cos * a.mean
        self.second = [(x**2).sum(0), -2 * (x * y).sum(0), (y**2).sum(0)]
        self.third = [(x**3).sum(0), -3 * (x * x * y).sum(0), 3 * (x * y * y).sum(0)]
        self.third.append(-(y**3).sum(0))

    def end(self, most: float, tail: float) -> Floats:
        """The last angle towards `most` that is not rejected, as c; infinite if none is."""
        inside, outside = self.centre, np.full_like(self.centre, most)
        past = np.zeros(self.centre.shape, dtype=bool)
        for step in range(1, STEPS + 1):
            angle = self.centre + (most - self.centre) * step / STEPS
            hit = ~past & self._rejected(angle, most, tail)
            outside, past = np.where(hit, angle, outside), past | hit
            inside = np.where(past, inside, angle)
        for _ in range(HALVINGS):
            middle = (inside + outside) / 2
            out = self._rejected(middle, most, tail)
            inside, outside = np.where(out, inside, middle), np.where(out, middle, outside)
        return np.where(past, np.tan(inside), np.sign(most) * np.inf)

    def _rejected(self, angle: Floats, most: float, tail: float) -> NDArray[np.bool_]:
        u, v = np.cos(angle - self.centre), np.sin(angle - self.centre)
        variance = sum(s * u ** (2 - k) * v**k for k, s in enumerate(self.second))
        cubes = sum(s * u ** (3 - k) * v**k for k, s in enumerate(self.third))
        degrees = self.contrast.degrees(np.cos(angle), np.sin(angle))
        with np.errstate(invalid="ignore", divide="ignore"):
            error = np.sqrt(np.maximum(variance, 0.0))
            t = -v * self.mean / error
            skew = cubes / error**3 * _small(self.contrast.units)
            toward = np.minimum(*(-np.sign(most) * one for one in (t, _forth(t, skew))))
        return np.asarray(stats.t.sf(toward, degrees) < tail)


@dataclass(frozen=True, slots=True)
class Tested:
    """Estimate of each column [m], with what its test needs."""

    estimate: Floats
    error: Floats
    """Standard error; 0 if all values are equal."""
    skew: Floats
    """Skewness of the estimate: that of the units, divided by the root of their number."""
    degrees: Floats
    units: NDArray[np.int64]
    informative: NDArray[np.int64]
    """Units whose value differs from the most common one, if more than half have that value."""
    common: Floats
    """The most common value, if most units have it; nan otherwise."""
    low: Floats
    high: Floats
    """The possible range."""

    def more(self) -> Floats:
        """One-sided p for a mean above 0; nan without evidence."""
        return self._tail(1)

    def less(self) -> Floats:
        """One-sided p for a mean below 0."""
        return self._tail(-1)

    def two_sided(self) -> Floats:
        """Twice the smaller one-sided p."""
        return np.asarray(np.minimum(2 * np.fmin(self.more(), self.less()), 1.0))

    def decides(self, alpha: float) -> NDArray[np.bool_]:
        """Whether so many informative units can give a two-sided p of `alpha`."""
        return (self.units >= MINIMUM) & (2.0 ** (1.0 - self.informative) <= alpha)

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Columns where too few units are informative for t, and a range bounds their effect."""
        bounded = np.isfinite(self.low) & np.isfinite(self.high) & ~np.isnan(self.common)
        return (self.units >= MINIMUM) & (self.informative < MINIMUM) & bounded

    def _tail(self, sign: int) -> Floats:
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            t = np.where(self.error > 0, self.estimate / self.error, np.nan)
            both = np.minimum(sign * t, sign * _forth(t, self.skew))
            p = np.maximum(stats.t.sf(both, self.degrees), 2.0 ** (-self.informative))
            # Whatever their distribution, the others are at most a share of the population.
            end, reach = (self.low, self.common) if sign > 0 else (-self.high, -self.common)
            share = np.clip(reach / (reach - end), 0, 1)
            counted = np.where(reach > 0, stats.binom.cdf(self.informative, self.units, share), 1.0)
        p = np.where((self.units >= MINIMUM) & (self.informative >= MINIMUM), p, np.nan)
        return np.where(self.counted, counted, p)

    def interval(self, level: float = 0.95) -> tuple[Floats, Floats]:
        """The values that the test does not reject, within the possible range; nan if there are
        too few informative units for this level."""
        tail = (1 - level) / 2
        with np.errstate(invalid="ignore"):
            reach = np.asarray(stats.t.isf(tail, self.degrees))
            low = self.estimate - self.error * np.maximum(reach, _back(reach, self.skew))
            high = self.estimate - self.error * np.minimum(-reach, _back(-reach, self.skew))
            share = stats.beta.isf(tail, self.informative + 1, self.units - self.informative)
            share = np.where(self.informative < self.units, share, 1.0)
            down = self.common - share * (self.common - self.low)
            up = self.common + share * (self.high - self.common)
        decided = self.decides(1 - level) & (self.error > 0)
        low, high = (np.where(decided, end, np.nan) for end in (low, high))
        low, high = np.where(self.counted, down, low), np.where(self.counted, up, high)
        return np.clip(low, self.low, self.high), np.clip(high, self.low, self.high)


def paired(
    a: ArrayLike,
    b: ArrayLike,
    cluster: ArrayLike | None = None,
    strata: ArrayLike | None = None,
    ranges: tuple[Ends, Ends] = (ANY, ANY),
) -> Contrast:
    """The contrast of two samples of the same prompts. A prompt without a value on one side does
    not count in that column."""
    first, second = two_samples(a, b)
    both = ~np.isnan(first) & ~np.isnan(second)
    one, other = (design_of(np.where(both, x, np.nan), cluster, strata) for x in (first, second))
    return Contrast(one, other, range_a=ranges[0], range_b=ranges[1])


def unpaired(
    a: ArrayLike,
    b: ArrayLike,
    clusters: tuple[ArrayLike | None, ArrayLike | None] = (None, None),
    strata: tuple[ArrayLike | None, ArrayLike | None] = (None, None),
    ranges: tuple[Ends, Ends] = (ANY, ANY),
) -> Contrast:
    """The contrast of two independent samples (Welch)."""
    first, second = two_samples(a, b)
    one = design_of(first, clusters[0], strata[0])
    other = design_of(second, clusters[1], strata[1])
    return Contrast(one, other, paired=False, range_a=ranges[0], range_b=ranges[1])


def one_sample(
    x: ArrayLike,
    cluster: ArrayLike | None = None,
    strata: ArrayLike | None = None,
    within: Ends = ANY,
) -> Tested:
    """The test of the mean of one sample against 0; `interval` gives that of the mean."""
    second = design_of(as_columns(x), cluster, strata)
    nothing = replace(second, mean=0 * second.mean, parts=0 * second.parts, sums=0 * second.sums)
    return Contrast(nothing, second, range_b=within).at(0.0)


def detectable(n: int, tests: int = 1) -> float:
    """The difference, in standard deviations of the prompts, that n prompts find four times in
    five, in each of so many tests corrected together."""
    if n < MINIMUM or 2.0 ** (1 - n) > 0.05 / tests:
        return float("nan")
    reach = stats.t.isf(0.025 / tests, n - 1) + stats.t.isf(0.2, n - 1)
    return float(reach / np.sqrt(n))


def effect_of(contrast: Contrast) -> Floats:
    """The difference in standard deviations (paired: of the differences; else the pooled one),
    with Hedges' correction for few prompts."""
    a, b = contrast.first, contrast.second
    if contrast.paired:
        spread, degrees = (b.x - a.x), np.maximum(b.prompts - 1, 1)
        squares = np.nansum((spread - (b.mean - a.mean)) ** 2, 0)
    else:
        degrees = np.maximum(a.prompts + b.prompts - 2, 1)
        squares = sum(np.nansum((side.x - side.mean) ** 2, 0) for side in (a, b))
    deviation = np.sqrt(squares / degrees)
    scale = np.abs(a.mean) + np.abs(b.mean)
    with np.errstate(invalid="ignore", divide="ignore"):
        effect = np.where(deviation > 1e-12 * scale, (b.mean - a.mean) / deviation, np.nan)
    return np.asarray(effect * (1 - 3 / (4 * degrees - 1)))


def _informative(values: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Number of informative units of each column, and the most common value. All units are
    informative unless more than half of them share one value; then the others are."""
    x = np.sort(values, axis=0)  # nan last
    n = (~np.isnan(x)).sum(0)
    if not len(x):
        return n, np.full(x.shape[1], np.nan)
    middle = x[np.maximum(n - 1, 0) // 2, np.arange(x.shape[1])]
    with np.errstate(invalid="ignore"):
        same = (np.abs(values - middle) <= 1e-12 * np.abs(middle)).sum(0)
    most = 2 * same > n
    return np.where(most, n - same, n), np.where(most, middle, np.nan)


def _small(units: NDArray[np.int64]) -> Floats:
    """Factor of the skewness estimate for small samples."""
    n = np.maximum(units, 3).astype(float)
    return np.asarray(np.sqrt(n * (n - 1)) / (n - 2))


def _forth(t: Floats, skew: Floats) -> Floats:
    """Hall's monotone cubic transformation, which makes a skewed t nearly symmetric."""
    return np.asarray(t + skew * t**2 / 3 + skew**2 * t**3 / 27 + skew / 6)


def _back(y: Floats, skew: Floats) -> Floats:
    """The inverse of `_forth`."""
    some = np.abs(skew) > 1e-6
    safe = np.where(some, skew, 1.0)
    cubic = 3 / safe * (np.cbrt(1 + safe * (y - safe / 6)) - 1)
    return np.where(some, cubic, y - skew / 6 - skew * y**2 / 3)
