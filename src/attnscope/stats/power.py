"""How many prompts an effect needs: power of the comparisons in `paired.py`, before they are run.

A permutation test of a mean has, but for a few per cent at small n, the power of the t-test, which
has a formula. The correction over heads enters as the p-value that a head has to reach, given how
many heads have the effect.
"""

import math

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from attnscope.errors import InputError
from attnscope.stats.paired import MINIMUM

__all__ = ["power", "prompts_needed", "threshold"]

MOST = 10_000_000


def threshold(
    share_found: float, *, level: float = 0.05, tests: int = 1, effects: int = 1
) -> float:
    """The p-value a head has to reach after Benjamini–Hochberg over `tests` heads, of which
    `effects` have an effect and `share_found` of those are found.
    """
    if not 1 <= effects <= tests:
        raise InputError(f"effects={effects!r}: from 1 to all of the {tests} heads tested")
    null = tests - effects
    return min(level, level * max(effects * share_found, 1) / (tests - level * null))


def power(
    effect: float,
    n: int,
    *,
    level: float = 0.05,
    tests: int = 1,
    effects: int = 1,
    paired: bool = True,
) -> float:
    """The share of heads with this standardised effect that n prompts (a side) will find."""
    _check(effect, level)
    if n < 2:
        return 0.0
    degrees = n - 1 if paired else 2 * n - 2
    shift = abs(effect) * math.sqrt(n if paired else n / 2)
    spreads = np.sqrt(stats.chi2.ppf(_SHARES, degrees) / degrees)
    found = 1.0
    for _ in range(1000):  # falls to the largest share that agrees with its own threshold
        reach = threshold(found, level=level, tests=tests, effects=effects)
        limit = stats.t.isf(reach / 2, degrees)
        now = _beyond(limit, shift, spreads)
        if found - now < 1e-9:
            return now
        found = now
    return found


def prompts_needed(
    effect: float,
    *,
    power: float = 0.8,
    level: float = 0.05,
    tests: int = 1,
    effects: int = 1,
    paired: bool = True,
) -> int:
    """The fewest prompts (a side) that find this standardised effect with this power."""
    _check(effect, level)
    if not 0 < power < 1:
        raise InputError(f"power={power!r}: lies between 0 and 1")
    wanted = power

    def enough(n: int) -> bool:
        found = _power(effect, n, level=level, tests=tests, effects=effects, paired=paired)
        return found >= wanted

    high = MINIMUM
    while not enough(high):
        high *= 2
        if high > MOST:
            raise InputError(f"effect={effect!r} would need more than {MOST:,} prompts")
    low = max(MINIMUM - 1, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _beyond(limit: float, shift: float, spreads: NDArray[np.float64]) -> float:
    """How often |t| is beyond a limit: the normal's answer, averaged over estimated spreads.

    scipy's noncentral t, and its noncentral F, are nan for some large shifts.
    """
    far = special.ndtr(shift - limit * spreads) + special.ndtr(-shift - limit * spreads)
    return float(far.mean())


_SHARES = (np.arange(2000) + 0.5) / 2000
_power = power


def _check(effect: float, level: float) -> None:
    if not (math.isfinite(effect) and effect != 0):
        raise InputError(f"effect={effect!r}: a standardised effect is a number other than 0")
    if not 0 < level < 1:
        raise InputError(f"level={level!r}: lies between 0 and 1")
