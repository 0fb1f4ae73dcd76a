"""Shares of right answers: of one share, and of the difference of two shares of the same problems.

The interval of a share is Wilson's; that of a difference is Newcombe's (1998, method 10), made of
two of Wilson's. p is the level at which the latter ends at 0, so the two agree.
"""

import numpy as np
from scipy import stats

from attnscope.stats.clusters import Floats

HALVINGS = 60


def newcombe(a: Floats, b: Floats, level: float = 0.95) -> dict[str, Floats]:
    """Difference, interval and p of columns [problems, m] of 0 and 1, second minus first."""
    n = len(a)
    both, first = (a * b).sum(0), (a * (1 - b)).sum(0)
    second = ((1 - a) * b).sum(0)
    cells = np.stack([both, first, second, n - both - first - second])
    low, high = _ends(cells, n, np.full(a.shape[1], stats.norm.isf((1 - level) / 2)))
    inside, outside = np.zeros(a.shape[1]), np.full(a.shape[1], 40.0)
    for _ in range(HALVINGS):  # the largest z whose interval excludes 0
        z = (inside + outside) / 2
        ends = _ends(cells, n, z)
        out = (ends[0] > 0) | (ends[1] < 0)
        inside, outside = np.where(out, z, inside), np.where(out, outside, z)
    return {
        "difference": (second - first) / n,
        "low": low,
        "high": high,
        "p": np.where(first == second, 1.0, 2 * stats.norm.sf(inside)),
    }


def _ends(cells: Floats, n: int, z: Floats) -> tuple[Floats, Floats]:
    """The ends of the interval at the normal quantile z."""
    both, first, second, neither = cells
    p_a, p_b = (both + first) / n, (both + second) / n
    (low_a, high_a), (low_b, high_b) = (_wilson(p, n, z) for p in (p_a, p_b))
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    numerator = both * neither - first * second
    # Newcombe's continuity correction of the correlation of the two shares.
    numerator = np.where(numerator > n / 2, numerator - n / 2, np.minimum(numerator, 0))
    phi = np.where(margins > 0, numerator / np.sqrt(np.maximum(margins, 1)), 0.0)
    difference = p_b - p_a
    down_b, up_b, down_a, up_a = p_b - low_b, high_b - p_b, p_a - low_a, high_a - p_a
    down = np.sqrt(np.maximum(down_b**2 - 2 * phi * down_b * up_a + up_a**2, 0))
    up = np.sqrt(np.maximum(up_b**2 - 2 * phi * up_b * down_a + down_a**2, 0))
    return np.maximum(difference - down, -1.0), np.minimum(difference + up, 1.0)


def wilson(values: Floats) -> tuple[float, float]:
    """The 95 % interval of a share: of the mean of values 0 and 1."""
    low, high = _wilson(np.array([values.mean()]), len(values), stats.norm.isf((1 - 0.95) / 2))
    return max(float(low[0]), 0.0), min(float(high[0]), 1.0)


def _wilson(p: Floats, n: int, z: float | Floats) -> tuple[Floats, Floats]:
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return middle - reach, middle + reach
