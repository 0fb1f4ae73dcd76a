"""Computes power: how many prompts an effect needs, and which effect a number of prompts detects.

A permutation test of a mean has nearly the power of the t test, which has a formula. But its p
cannot be below `min_p`: with n units that is 2 / 2ⁿ. With few units it also loses power to the
correction for skewness; that loss is counted in `DRAWS` samples of normal differences. The
correction over heads is the p-value that a head has to reach, given how many heads have the effect.
If that is below `min_p`, power is 0.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from attnscope.errors import InputError, unknown
from attnscope.stats.arrays import Floats, out_of_range
from attnscope.stats.intervals import MINIMUM, moments, moments_unpaired, two_sided

MOST = 10_000_000
DRAWS = 1000
FEW = 200
"""Up to so many units the loss is simulated; above, it is below half a per cent."""
SIGNS = 13
"""Up to so many units `compare` enumerates all sign patterns."""
CORRECTIONS = ("fdr", "max")
"""Benjamini–Hochberg, or the step-down maximum."""


def min_p(units: int, *, paired: bool = True) -> float:
    """The smallest possible p of a permutation test with so many units (per side)."""
    if paired:
        return 2.0 ** (1 - units)
    ways = special.gammaln(2 * units + 1) - 2 * special.gammaln(units + 1)
    return float(2 * np.exp(-ways))


def threshold(
    share_found: float,
    *,
    level: float = 0.05,
    tests: int = 1,
    effects: int = 1,
    correction: str = "fdr",
) -> float:
    """The p-value a head has to reach among `tests` heads, of which `effects` have an effect and
    `share_found` of those are detected.

    For "max" the heads are assumed independent; dependent heads are detected more easily.
    """
    if not 1 <= effects <= tests:
        raise out_of_range("effects", effects, f"1 to {tests}, the number of tests")
    if correction not in CORRECTIONS:
        raise unknown("correction", correction, CORRECTIONS)
    if correction == "max":
        return -math.expm1(math.log1p(-level) / tests)
    null = tests - effects
    return min(level, level * max(effects * share_found, 1) / (tests - level * null))


def power(
    effect: float,
    n: int,
    *,
    level: float = 0.05,
    tests: int = 1,
    effects: int = 1,
    correction: str = "fdr",
    paired: bool = True,
    cluster_size: int = 1,
    icc: float = 0.0,
) -> float:
    """The share of heads with this standardised effect that n prompts (per side) detect.

    Prompts in clusters of `cluster_size`, whose intraclass correlation is `icc`, are tested by
    cluster: there are n // `cluster_size` units.
    """
    _check(effect, level, cluster_size, icc)
    units = n // cluster_size
    if units < MINIMUM:
        return 0.0
    of_unit = abs(effect) * math.sqrt(cluster_size / (1 + (cluster_size - 1) * icc))
    degrees = units - 1 if paired else 2 * units - 2
    shift = of_unit * math.sqrt(units if paired else units / 2)
    spreads = np.sqrt(stats.chi2.ppf(_SHARES, degrees) / degrees)
    samples = _chances(of_unit, units, paired) if units <= FEW else None
    # The maximum has its own permutation distribution, so its min_p is that of one test.
    least = min_p(units, paired=paired)
    share = 1.0
    for _ in range(1000):  # converges to the largest consistent share
        reach = threshold(share, level=level, tests=tests, effects=effects, correction=correction)
        if least > (level if correction == "max" else reach):
            return 0.0
        now = _beyond(stats.t.isf(reach / 2, degrees), shift, spreads)
        if samples is not None:
            now = min(max(now - _lost(samples, reach, level, correction), 0.0), 1.0)
        if share - now < 1e-9:
            return now
        share = now
    return share


def prompts_needed(effect: float, *, power: float = 0.8, **design: Any) -> int:
    """The smallest number of prompts (per side) that detects this standardised effect with this
    power; `design` as for `power`."""
    size = design.get("cluster_size", 1)
    _check(effect, design.get("level", 0.05), size, design.get("icc", 0.0))
    _share(power)

    def enough(units: int) -> bool:
        return _power(effect, units * size, **design) >= power

    high = MINIMUM
    while not enough(high):
        high *= 2
        if high > MOST:
            raise InputError(
                f"effect={effect!r} needs more than {MOST:,} prompts",
                code="effect-too-small",
                effect=effect,
            )
    low = max(MINIMUM - 1, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return int(high * size)


def detectable(n: int, *, power: float = 0.8, **design: Any) -> float:
    """The smallest standardised effect that n prompts (per side) detect with this power; nan if
    they detect none. `design` as for `power`."""
    _share(power)
    high = 1.0
    while _power(high, n, **design) < power:
        high *= 2
        if high > 1e6:
            return float("nan")
    low = 0.0
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _power(middle, n, **design) >= power else (middle, high)
    return high


def _lost(samples: tuple[Floats, Floats, Floats], reach: float, level: float, how: str) -> float:
    """The share that Student's t detects and `compare` does not."""
    student, signs, skewed = samples
    if how == "max":
        detected = (student <= reach) & (skewed <= level)
    else:
        detected = np.maximum(signs, skewed) <= reach
    return float((student <= reach).mean() - detected.mean())


def _chances(effect: float, units: int, paired: bool) -> tuple[Floats, Floats, Floats]:
    """p-values of samples with this effect: Student's, those of all sign patterns (if they are
    enumerated, else Student's), and those corrected for skewness."""
    first, second, flipped = _samples(units, paired)
    estimated = moments(second + effect) if paired else moments_unpaired(first, second + effect)
    student = np.asarray(
        2 * stats.t.sf(np.abs(estimated.estimate / estimated.error), estimated.degrees)
    )
    signs = student
    if flipped is not None:
        patterns, sums = flipped
        observed = np.abs((second + effect).sum(0)) * (1 - 1e-6)
        signs = (np.abs(sums + effect * patterns[:, None]) >= observed).mean(0)
    return student, signs, two_sided(estimated)


@lru_cache(maxsize=8)
def _samples(
    units: int, paired: bool
) -> tuple[Floats, Floats, tuple[Floats, NDArray[np.float32]] | None]:
    """Two groups without an effect. If all sign patterns are enumerated: also the sum of each
    pattern, and the sums of the second group under each pattern."""
    rng = np.random.default_rng(units)
    first, second = rng.normal(size=(2, units, DRAWS))
    if not paired or units > SIGNS:
        return first, second, None
    # A pattern and its opposite are equally far from 0, so half of them suffice.
    signs = 1.0 - 2.0 * (np.arange(2 ** (units - 1))[:, None] >> np.arange(units) & 1)
    return first, second, (signs.sum(1), (signs @ second).astype(np.float32))


def _beyond(limit: float, shift: float, spreads: NDArray[np.float64]) -> float:
    """Probability that |t| exceeds a limit, averaged over estimated spreads.

    scipy's noncentral t, and its noncentral F, are nan for some large shifts.
    """
    far = special.ndtr(shift - limit * spreads) + special.ndtr(-shift - limit * spreads)
    return float(far.mean())


_SHARES = (np.arange(2000) + 0.5) / 2000
_power = power


def _share(power: float) -> None:
    if not 0 < power < 1:
        raise out_of_range("power", power, "between 0 and 1")


def _check(effect: float, level: float, cluster_size: int, icc: float) -> None:
    if not (math.isfinite(effect) and effect != 0):
        raise out_of_range("effect", effect, "any finite number but 0")
    if not 0 < level < 1:
        raise out_of_range("level", level, "between 0 and 1")
    if cluster_size < 1:
        raise out_of_range("cluster_size", cluster_size, "1 or more")
    if not 0 <= icc <= 1:
        raise out_of_range("icc", icc, "0 to 1")
