"""Computes ratios of means and standardised effects with their confidence intervals."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from attnscope.stats.arrays import Floats, mean_of
from attnscope.stats.intervals import (
    MINIMUM,
    Moments,
    hull,
    moments,
    moments_unpaired,
)
from attnscope.stats.units import units

Labels = dict[str, Any]
"""`cluster` and `strata` of the rows of a sample, as `units` takes them."""

# If the first mean is within so many standard errors of 0, the ratio has no interval.
AWAY = 3.0


def _within(estimated: Moments, level: float, enough: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """The ends of the interval; nan if there are too few units or no variance."""
    defined = enough & (estimated.error > 0)
    low, high = (np.where(defined, end, np.nan) for end in hull(estimated, level))
    return low, high


def ratio_of(
    a: Floats, b: Floats, mean_a: Floats, mean_b: Floats, level: float, labels: Labels
) -> dict[str, Floats]:
    """Ratio of means, and its interval from each prompt's influence on its logarithm."""
    of_a = units(a, **labels)
    sure = _away(moments(of_a.x, of_a.degrees)) & (mean_b > 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.log(mean_b / mean_a) + b / mean_b - a / mean_a
    sample = units(np.where(sure, shares, np.nan), **labels)
    low, high = _within(moments(sample.x, sample.degrees), level, sample.n >= MINIMUM)
    return _ratio_figures(mean_a, mean_b, low, high)


def ratio_unpaired(
    a: Floats,
    b: Floats,
    mean_a: Floats,
    mean_b: Floats,
    level: float,
    labels: tuple[Labels, Labels],
) -> dict[str, Floats]:
    """Ratio of the means of two independent samples, with its interval."""
    sides = []
    sure = mean_b > 0
    for x, mean, of in ((a, mean_a, labels[0]), (b, mean_b, labels[1])):
        sample = units(x, **of)
        sure = sure & _away(moments(sample.x, sample.degrees))
        with np.errstate(invalid="ignore", divide="ignore"):
            sides.append(units(np.where(mean > 0, np.log(mean) + x / mean - 1, np.nan), **of))
    estimated = moments_unpaired(sides[0].x, sides[1].x)
    enough = np.minimum(sides[0].n, sides[1].n) >= MINIMUM
    low, high = _within(estimated, level, enough & sure)
    return _ratio_figures(mean_a, mean_b, low, high)


def _away(estimated: Moments) -> NDArray[np.bool_]:
    with np.errstate(invalid="ignore"):
        return np.asarray((estimated.estimate > 0) & (estimated.estimate > AWAY * estimated.error))


def _ratio_figures(mean_a: Floats, mean_b: Floats, low: Floats, high: Floats) -> dict[str, Floats]:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where((mean_a > 0) & (mean_b >= 0), mean_b / mean_a, np.nan)
    with np.errstate(over="ignore"):  # an infinite end becomes nan
        ends = [np.where(np.isfinite(end), end, np.nan) for end in (np.exp(low), np.exp(high))]
    return {"ratio": ratio, "ratio_low": ends[0], "ratio_high": ends[1]}


def effect_of(
    d: Floats, difference: Floats, spread: Floats, level: float, labels: Labels
) -> dict[str, Floats]:
    """Difference over the standard deviation of the differences, with Hedges' correction for few
    prompts, and its interval from each prompt's influence."""
    n = (~np.isnan(d)).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        raw = np.where(spread > 0, difference / spread, np.nan)
        z = (d - difference) / spread
        added = raw + z - raw / 2 * (z**2 - 1)
    sample = units(np.where(spread > 0, added, np.nan), **labels)
    estimated = replace(moments(sample.x, sample.degrees), estimate=raw)
    low, high = _within(estimated, level, sample.n >= MINIMUM)
    return _effect_figures(raw, low, high, n - 1)


def effect_unpaired(
    a: Floats, b: Floats, difference: Floats, level: float, labels: tuple[Labels, Labels]
) -> dict[str, Floats]:
    """Standardised effect of two independent samples, over their pooled standard deviation."""
    n_a, n_b = (~np.isnan(a)).sum(0), (~np.isnan(b)).sum(0)
    squares = [
        np.nan_to_num(spread_of(x)) ** 2 * np.maximum(n - 1, 0) for x, n in ((a, n_a), (b, n_b))
    ]
    degrees = n_a + n_b - 2
    with np.errstate(divide="ignore", invalid="ignore"):
        pooled = np.sqrt(np.where(degrees > 0, (squares[0] + squares[1]) / degrees, np.nan))
        raw = np.where(pooled > 0, difference / pooled, np.nan)
        sides = []
        for x, n, sign, of in ((a, n_a, -1, labels[0]), (b, n_b, 1, labels[1])):
            z = (x - mean_of(x)) / pooled
            influence = z - sign * raw / 2 * (n / (n_a + n_b)) * (z**2 - mean_of(z**2))
            sides.append(units(np.where(pooled > 0, influence, np.nan), **of))
    estimated = replace(moments_unpaired(sides[0].x, sides[1].x), estimate=raw)
    enough = np.minimum(sides[0].n, sides[1].n) >= MINIMUM
    low, high = _within(estimated, level, enough)
    return _effect_figures(raw, low, high, degrees)


def _effect_figures(
    raw: Floats, low: Floats, high: Floats, degrees: NDArray[Any]
) -> dict[str, Floats]:
    free = np.maximum(degrees, 1) / 2
    few = np.where(
        degrees > 1,
        np.exp(special.gammaln(free) - special.gammaln(np.maximum(free - 0.5, 0.25)))
        / np.sqrt(free),
        np.nan,
    )
    return {"effect": raw * few, "effect_low": low * few, "effect_high": high * few}


def spread_of(x: Floats) -> Floats:
    """Standard deviation over n - 1; exactly 0 if all values are equal."""
    known = ~np.isnan(x)
    n = known.sum(0)
    spread = np.sqrt(np.nansum((x - mean_of(x)) ** 2, 0) / np.maximum(n - 1, 1))
    least, most = np.where(known, x, np.inf).min(0), np.where(known, x, -np.inf).max(0)
    return np.where(n > 1, np.where(least == most, 0.0, spread), np.nan)
