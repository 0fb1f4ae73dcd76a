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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from attnscope.errors import wrong_shape
from attnscope.measures.measure import ANY
from attnscope.stats.clusters import Design, Floats, as_columns, design_of

MINIMUM = 6
"""Minimum number of units: with 5 equal signs, the smallest two-sided p is 2 / 32 = 0.0625."""
SKEWED = 0.3
"""A quantity is called skewed if the skewness of its mean is larger."""
SKEW_NOTE = "skewed across prompts: use more prompts or medians"
STEPS, HALVINGS = 16, 24
"""The end of a ratio's interval is looked for at so many angles, then halved so often."""
Number = float | Floats
Ends = tuple[Number, Number]
"""The possible values of a sample: of all columns, or one for each."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """Two samples with the same columns, ready to be tested."""

    first: Design
    second: Design
    paired: bool = True
    ranges: tuple[Ends, Ends] = (ANY, ANY)
    """The possible values of both."""

    @property
    def units(self) -> NDArray[np.int64]:
        """Units with a value; of two independent groups, those of the smaller one."""
        n = self.second.units
        return n if self.paired else np.minimum(n, self.first.units)

    def at(self, c: Number, d: Number = 0.0, u: Number = 1.0) -> Tested:
        """The test of `u * b - c * a - d`."""
        informative, common = self._informative(c, u)
        counts = (self.units, informative, common - d)
        return Tested(*self._moments(c, d, u), *counts, *self._range(c, d, u))

    def _moments(self, c: Number, d: Number, u: Number) -> tuple[Floats, Floats, Floats, Floats]:
        """Estimate, standard error, skewness and degrees of freedom."""
        a, b = self.first, self.second
        estimate = u * b.mean - c * a.mean - d
        if self.paired:
            parts, degrees = u * b.parts - c * a.parts, b.degrees
        else:
            parts = np.concatenate([u * b.parts, -c * a.parts])
            of_a, of_b = ((k**2 * (s.parts**2).sum(0)) for k, s in ((c, a), (u, b)))
        scale = np.abs(u * b.mean) + np.abs(c * a.mean) + np.abs(d)
        squares = parts * parts
        error = np.sqrt(squares.sum(0))
        error = np.where(error > 1e-12 * scale, error, 0.0)  # equal values up to rounding
        with np.errstate(invalid="ignore", divide="ignore"):
            third = np.where(error > 0, np.einsum("ij,ij->j", squares, parts) / error**3, 0.0)
            if not self.paired:  # Welch
                degrees = (of_a + of_b) ** 2 / (of_a**2 / a.degrees + of_b**2 / b.degrees)
        n = np.maximum(self.units, 3).astype(float)
        return estimate, error, third * np.sqrt(n * (n - 1)) / (n - 2), degrees

    def _informative(self, c: Number, u: Number) -> tuple[NDArray[np.int64], Floats]:
        """Informative units, and the most common value (only of single prompts)."""
        a, b = self.first, self.second
        if self.paired:
            n, common = _informative(u * b.values - c * a.values)
            return n, np.where((b.sizes <= 1).all(0), common, np.nan)
        n = np.minimum(_informative(a.values)[0], _informative(b.values)[0])
        return n, np.full(n.shape, np.nan)

    def _range(self, c: Number, d: Number, u: Number) -> tuple[Floats, Floats]:
        """The possible range of `u * b - c * a - d`."""
        one = np.ones(len(self.second.mean))
        with np.errstate(invalid="ignore"):
            of_a, of_b = self.ranges
            ends = [one * (c * end) if np.any(c) else 0.0 * one for end in of_a]
            low = one * (u * of_b[0]) - d - np.maximum(*ends)
            high = one * (u * of_b[1]) - d - np.minimum(*ends)
        return low, high

    def ratio(self, level: float = 0.95) -> tuple[Floats, Floats, Floats]:
        """The ratio of the means, b / a, with its interval: every c for which the test of
        `b - c * a` does not reject. An end is infinite if no c on that side is rejected. nan if
        the mean of a is not above 0."""
        mean_a = self.first.mean
        with np.errstate(invalid="ignore"):
            centre = np.arctan2(self.second.mean, np.where(mean_a > 0, mean_a, np.nan))
        tested = self.at(np.sin(centre), 0.0, np.cos(centre))
        # Of two quantities that are never below 0, no ratio is below 0.
        positive = np.minimum(self.ranges[0][0], self.ranges[1][0]) >= 0
        decided, tail = tested.decides(1 - level) & (tested.error > 0), (1 - level) / 2
        low = self._end(centre, np.where(positive, 0.0, -np.pi / 2), tail)
        high = self._end(centre, np.full_like(centre, np.pi / 2), tail)
        low = np.where(positive & np.isinf(low), 0.0, low)
        return np.tan(centre), np.where(decided, low, np.nan), np.where(decided, high, np.nan)

    def _end(self, centre: Floats, most: Floats, tail: float) -> Floats:
        """The last c, from the ratio to `most`, that is not rejected; infinite if `most` is not.
        Angles of c are searched, because a ratio may be unbounded."""
        sign = np.where(most > centre, -1, 1)

        def rejected(angle: Floats) -> NDArray[np.bool_]:
            moments = self._moments(np.sin(angle), 0.0, np.cos(angle))
            return _tail(*moments, sign) < tail

        step, last = (most - centre) / STEPS, np.zeros(centre.shape)
        for number in range(1, STEPS + 1):  # the set may have gaps: its outermost angle counts
            last = np.where(rejected(centre + number * step), last, number)
        inside, outside = centre + last * step, centre + np.minimum(last + 1, STEPS) * step
        for _ in range(HALVINGS):
            middle = (inside + outside) / 2
            out = rejected(middle)
            inside, outside = np.where(out, inside, middle), np.where(out, middle, outside)
        return np.where(last == STEPS, -sign * np.inf, np.tan(inside))


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
            p = _tail(self.estimate, self.error, self.skew, self.degrees, sign)
            p = np.maximum(p, 2.0 ** (-self.informative))
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
    first, second = _two_samples(a, b)
    both = ~np.isnan(first) & ~np.isnan(second)
    one, other = (design_of(np.where(both, x, np.nan), cluster, strata) for x in (first, second))
    return Contrast(one, other, ranges=ranges)


def unpaired(
    a: ArrayLike,
    b: ArrayLike,
    labels: Sequence[Mapping[str, ArrayLike | None]] = ({}, {}),
    ranges: tuple[Ends, Ends] = (ANY, ANY),
) -> Contrast:
    """The contrast of two independent samples (Welch); `labels` are `cluster` and `strata` of
    each."""
    pairs = zip(_two_samples(a, b), labels, strict=True)
    one, other = (design_of(x, **of_x) for x, of_x in pairs)
    return Contrast(one, other, False, ranges)


def one_sample(
    x: ArrayLike,
    cluster: ArrayLike | None = None,
    strata: ArrayLike | None = None,
    within: Ends = ANY,
) -> Tested:
    """The test of the mean of one sample against 0; `interval` gives that of the mean."""
    second = design_of(as_columns(x), cluster, strata)
    zero = replace(second, mean=0 * second.mean, parts=0 * second.parts, values=0 * second.values)
    return Contrast(zero, second, ranges=(ANY, within)).at(0.0)


def effect_of(contrast: Contrast) -> Floats:
    """The difference in standard deviations (paired: of the differences; else the pooled one),
    with Hedges' correction for few prompts."""
    a, b = contrast.first, contrast.second
    samples = [(a.x, a.mean), (b.x, b.mean)]
    samples = [(b.x - a.x, b.mean - a.mean)] if contrast.paired else samples
    degrees = np.maximum(sum((~np.isnan(x)).sum(0) for x, _ in samples) - len(samples), 1)
    squares = sum(np.nansum((x - mean) ** 2, 0) for x, mean in samples)
    deviation = np.sqrt(squares / degrees)
    with np.errstate(invalid="ignore", divide="ignore"):
        varies = deviation > 1e-12 * (np.abs(a.mean) + np.abs(b.mean))
        effect = np.where(varies, (b.mean - a.mean) / deviation, np.nan)
    return np.asarray(effect * (1 - 3 / (4 * degrees - 1)))


def _two_samples(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats]:
    """Two samples of the same columns."""
    first, second = as_columns(a), as_columns(b)
    if first.shape[1] != second.shape[1]:
        raise wrong_shape("the second sample", f"{first.shape[1]} columns wide", second)
    return first, second


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


def _tail(
    estimate: Floats, error: Floats, skew: Floats, degrees: Floats, sign: int | NDArray[np.int64]
) -> Floats:
    """One-sided p of Student's t and of t with Hall's monotone cubic transformation, which makes a
    skewed t nearly symmetric: the larger of the two."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        t = np.where(error > 0, estimate / error, np.nan)
        hall = t + skew * t**2 / 3 + skew**2 * t**3 / 27 + skew / 6
        return np.asarray(stats.t.sf(np.minimum(sign * t, sign * hall), degrees))


def _back(y: Floats, skew: Floats) -> Floats:
    """The inverse of Hall's transformation."""
    some = np.abs(skew) > 1e-6
    safe = np.where(some, skew, 1.0)
    cubic = 3 / safe * (np.cbrt(1 + safe * (y - safe / 6)) - 1)
    return np.where(some, cubic, y - skew / 6 - skew * y**2 / 3)
