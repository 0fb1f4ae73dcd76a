"""Compares two samples: difference, ratio, standardised effect, intervals, tests, power."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.errors import InputError
from attnscope.stats import correction
from attnscope.stats.arrays import Floats, mean_of
from attnscope.stats.effect_sizes import (
    Labels,
    effect_of,
    effect_unpaired,
    ratio_of,
    ratio_unpaired,
    spread_of,
)
from attnscope.stats.intervals import (
    MINIMUM,
    Moments,
    intervals,
    intervals_unpaired,
    moments,
    moments_unpaired,
    one_sided,
    two_sided,
)
from attnscope.stats.permute import least, relabel, sign_flip
from attnscope.stats.power import detectable
from attnscope.stats.units import Units, design_effect, intraclass, units

MOST_FLIPS = 200_000
TESTED = "the larger of a permutation test's and of a t test's that is corrected for skewness"
"""How p is computed, for captions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastSettings:
    """Settings of intervals and tests."""

    level: float = 0.95
    resamples: int = 10_000
    """Minimum number; tests of many columns draw more."""
    seed: int = 0
    families: str = "each"
    """See `correction.FAMILIES`."""
    margin: float | str | None = None
    """The smallest difference that counts: a number, or "5%" of the first's mean."""

    @property
    def alpha(self) -> float:
        """The largest q that counts as significant."""
        return round(1 - self.level, 12)


def paired_contrast(
    a: Floats,
    b: Floats,
    family: ArrayLike,
    settings: ContrastSettings,
    labels: Labels | None = None,
) -> dict[str, Any]:
    """Statistics of `b` against `a`, both [prompts, columns] of the same prompts, as arrays."""
    labels = labels or {}
    d = b - a
    both = ~np.isnan(d)
    a, b = np.where(both, a, np.nan), np.where(both, b, np.nan)
    scale = np.maximum(np.abs(a), np.abs(b))
    d = _without_rounding(d, np.where(both, scale, 0.0).max(0, initial=0.0))
    sample = units(d, **labels)
    estimated = moments(sample.x, sample.degrees)
    flips = _flips(family, settings)
    p, stepped = sign_flip(sample.parts, family=family, resamples=flips, seed=settings.seed)
    # If most units share one value, only the others carry information.
    min_p = np.maximum(least(sample.n, flips), np.minimum(2.0 ** (1 - sample.informative), 1.0))
    mean_a, mean_b = mean_of(a), mean_of(b)
    spread = spread_of(d)
    n = both.sum(0)
    return {
        "n": n,
        "units": sample.n,
        "n_a": n,
        "n_b": n,
        "mean_a": mean_a,
        "mean_b": mean_b,
        **_of_difference(estimated, sample, settings),
        **ratio_of(a, b, mean_a, mean_b, settings.level, labels),
        **effect_of(d, estimated.estimate, spread, settings.level, labels),
        **_tested(p, stepped, estimated, sample.n, min_p, family, mean_a, settings),
        **_clustering(d, sample, labels),
        "left_out": len(d) - n,
    }


def unpaired_contrast(
    a: Floats,
    b: Floats,
    family: ArrayLike,
    settings: ContrastSettings,
    labels: tuple[Labels, Labels] | None = None,
) -> dict[str, Any]:
    """Statistics of two independent samples with the same columns and different prompts."""
    of_a, of_b = labels or ({}, {})
    units_a, units_b = units(a, **of_a), units(b, **of_b)
    estimated = moments_unpaired(units_a.x, units_b.x)
    n_a, n_b = (~np.isnan(a)).sum(0), (~np.isnan(b)).sum(0)
    mean_a, mean_b = mean_of(a), mean_of(b)
    flips = _flips(family, settings)
    p, stepped = relabel(units_a.x, units_b.x, family=family, resamples=flips, seed=settings.seed)
    fewest = np.minimum(units_a.n, units_b.n)
    min_p = np.full(len(p), 1 / (flips + 1))
    interval = intervals_unpaired(
        units_a.x,
        units_b.x,
        level=settings.level,
        resamples=settings.resamples,
        seed=settings.seed,
    )
    difference = {
        "difference": estimated.estimate,
        "low": interval.low,
        "high": interval.high,
        "unreliable": interval.unreliable,
        "skew": estimated.skew,
        "informative": np.minimum(units_a.informative, units_b.informative),
        "detectable": _detectable(estimated, fewest, paired=False),
    }
    icc_a, icc_b = _clustering(a, units_a, of_a), _clustering(b, units_b, of_b)
    return {
        "n": n_a + n_b,
        "units": fewest,
        "n_a": n_a,
        "n_b": n_b,
        "mean_a": mean_a,
        "mean_b": mean_b,
        **difference,
        **ratio_unpaired(a, b, mean_a, mean_b, settings.level, (of_a, of_b)),
        **effect_unpaired(a, b, mean_b - mean_a, settings.level, (of_a, of_b)),
        **_tested(p, stepped, estimated, fewest, min_p, family, mean_a, settings),
        **{name: np.fmax(icc_a[name], icc_b[name]) for name in icc_a},
        "left_out": len(a) + len(b) - n_a - n_b,
    }


def margin_of(margin: float | str | None, mean_a: Floats) -> Floats | None:
    """The margin of each column."""
    if margin is None:
        return None
    try:
        relative = isinstance(margin, str) and margin.strip().endswith("%")
        size = float(str(margin).strip().removesuffix("%"))
    except ValueError:
        size = -1.0
        relative = False
    if not (np.isfinite(size) and size > 0):
        raise InputError(
            f"margin={margin!r} is no margin; give a number above 0, or a percentage of the "
            "first's mean such as 5%",
            code="bad-margin",
            value=margin,
        )
    return size / 100 * np.abs(mean_a) if relative else np.full(mean_a.shape, size)


def _flips(family: ArrayLike, settings: ContrastSettings) -> int:
    """Number of permutations with which a single head can pass the correction: the smallest p is
    half of 0.05 / tests."""
    numbers = np.asarray(family)
    largest = int(np.bincount(numbers).max(initial=1)) if len(numbers) else 1
    tests = largest if settings.families == "each" else max(len(numbers), 1)
    return max(settings.resamples, min(40 * tests, max(MOST_FLIPS, 40 * largest)))


def _of_difference(estimated: Moments, sample: Units, settings: ContrastSettings) -> dict[str, Any]:
    interval = intervals(
        sample.x,
        degrees=sample.degrees,
        informative=sample.informative,
        level=settings.level,
        resamples=settings.resamples,
        seed=settings.seed,
    )
    return {
        "difference": estimated.estimate,
        "low": interval.low,
        "high": interval.high,
        "unreliable": interval.unreliable,
        "skew": estimated.skew,
        "informative": sample.informative,
        "detectable": _detectable(estimated, sample.n, paired=True),
    }


def _detectable(estimated: Moments, n: NDArray[Any], *, paired: bool) -> Floats:
    """The difference that one test of n units detects with 80 % power."""
    standard = np.array([_standard(int(k), paired) for k in n])
    with np.errstate(invalid="ignore"):
        size = estimated.error * np.sqrt(n if paired else n / 2)
        return np.where(estimated.error > 0, standard * size, np.nan)


@cache
def _standard(n: int, paired: bool) -> float:
    return detectable(n, paired=paired)


def _tested(
    p: Floats,
    stepped: Floats,
    estimated: Moments,
    n: NDArray[Any],
    min_p: Floats,
    family: ArrayLike,
    mean_a: Floats,
    settings: ContrastSettings,
) -> dict[str, Any]:
    """p-values and their corrections. A p is the larger of the permutation test's, which is exact
    for symmetric differences, and that of a t test corrected for skewness. p is never below
    `min_p`."""
    largest = np.fmax(two_sided(estimated), min_p)
    enough = n >= MINIMUM
    p, stepped = (np.where(enough, np.fmax(one, largest), np.nan) for one in (p, stepped))
    columns: dict[str, Any] = {
        "p": p,
        "q": correction.corrected(p, family, settings.families),
        "p_fwer": stepped,
        "min_p": np.where(enough, min_p, np.nan),
    }
    if (bound := margin_of(settings.margin, mean_a)) is not None:
        sides = (one_sided(estimated, bound, "less"), one_sided(estimated, -bound, "more"))
        # Too few informative units cannot show equivalence either.
        equal = np.where(min_p > settings.alpha, 1.0, np.maximum(*sides))
        equal = np.where(enough, equal, np.nan)
        columns["margin"] = bound
        columns["p_equivalence"] = equal
        columns["q_equivalence"] = correction.corrected(equal, family, settings.families)
    return columns


def _clustering(x: Floats, sample: Units, labels: Labels) -> dict[str, Floats]:
    none = np.full(x.shape[1], np.nan)
    cluster = labels.get("cluster")
    return {
        "icc": none if cluster is None else intraclass(x, cluster),
        "design_effect": design_effect(x, sample)
        if any(v is not None for v in labels.values())
        else none,
    }


def _without_rounding(d: Floats, scale: Floats) -> Floats:
    """Replace differences that are equal up to float64 rounding by their mean."""
    mean = mean_of(d)
    mean = np.where(np.abs(mean) <= 1e-14 * scale, 0.0, mean)
    distance = np.where(np.isnan(d), 0.0, np.abs(d - mean)).max(0, initial=0.0)
    return np.where((distance <= 1e-14 * scale) & ~np.isnan(d), mean, d)
