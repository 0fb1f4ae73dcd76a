"""Many tests at once: false discovery rate, family-wise error, and how many heads."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from attnscope.stats.clusters import Floats
from attnscope.stats.means import MINIMUM, Contrast

HELD = 2**23
"""Resampled numbers in memory at a time (64 MiB)."""


def false_discovery(p: ArrayLike, family: ArrayLike) -> Floats:
    """Benjamini–Hochberg q-values within each family; a nan does not count and stays nan."""
    p, family = np.asarray(p, dtype=float), np.asarray(family)
    q = np.full(p.shape, np.nan)
    for number in np.unique(family):
        some = (family == number) & ~np.isnan(p)
        if some.any():
            q[some] = stats.false_discovery_control(p[some], method="bh")
    return q


def holm(p: ArrayLike) -> Floats:
    """Holm's family-wise p-values; a nan does not count and stays nan."""
    p = np.asarray(p, dtype=float)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known])]
    adjusted = np.full(p.shape, np.nan)
    steps = p[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def romano_wolf(contrast: Contrast, family: ArrayLike, *, resamples: int = 2_000) -> Floats:
    """Family-wise p of `b - a` in each column: the step-down maximum of bootstrapped t (Romano and
    Wolf 2005), for either sign. Heads whose prompts show no tail borrow it from the others of their
    family, and similar heads count less. Holm for independent groups, and where most prompts share
    one value."""
    tested = contrast.at(1.0)
    p, family = tested.two_sided(), np.asarray(family)
    adjusted = np.full(p.shape, np.nan)
    counted = tested.counted | (tested.error == 0)
    rows = len(contrast.second.parts)
    weights = np.random.default_rng(0).multinomial(rows, np.full(rows, 1 / rows), resamples)
    for number in np.unique(family):
        some = np.flatnonzero((family == number) & ~np.isnan(p))
        if not contrast.paired or (counted & (p < 1))[some].any():  # columns that have no t
            adjusted[some] = holm(p[some])
            continue
        some = some[~counted[some]]
        parts = contrast.second.parts[:, some] - contrast.first.parts[:, some]
        n = np.maximum((contrast.second.sizes[:, some] > 0).sum(0), 2)
        adjusted[some] = _steps(tested.estimate[some] / tested.error[some], parts, n, weights)
    return np.asarray(np.fmax(adjusted, p))


def _steps(t: Floats, parts: Floats, n: NDArray[np.int64], weights: NDArray[np.int64]) -> Floats:
    """Step-down p of each t from the largest and the smallest of resampled t."""
    parts = np.where(parts == 0, 0.0, parts - parts.sum(0) / n)
    sides = [(1, np.argsort(-t)), (-1, np.argsort(t))]
    counts = np.zeros((2, len(t)))
    size = max(1, HELD // max(len(t), 1))
    for done in range(0, len(weights), size):
        drawn = weights[done : done + size].astype(float)
        mean = drawn @ parts
        error = np.sqrt(np.maximum(drawn @ parts**2 - mean**2 / n, 1e-300))
        sampled = mean * np.sqrt((n - 1) / n) / error
        for count, (sign, order) in zip(counts, sides, strict=True):
            largest = np.maximum.accumulate((sign * sampled)[:, order[::-1]], axis=1)[:, ::-1]
            count[order] += (largest >= sign * t[order]).sum(0)
    p = (counts + 1) / (len(weights) + 1)
    for row, (_, order) in zip(p, sides, strict=True):
        row[order] = np.maximum.accumulate(row[order])
    return np.asarray(np.minimum(2 * p.min(0), 1.0))


def at_least(p: ArrayLike, alpha: float) -> int:
    """In how many of these heads, at least, an effect is shown: the largest k for which the partial
    conjunction test (Benjamini and Heller 2008, Bonferroni form) rejects "in fewer than k". Valid
    however the heads depend on one another. `p` are one-sided; a nan counts as 1."""
    ordered = np.sort(np.nan_to_num(np.asarray(p, dtype=float), nan=1.0))
    shown = np.arange(len(ordered), 0, -1) * ordered <= alpha
    return int(len(ordered) if shown.all() else np.argmin(shown))


def prompts_for(tests: int, alpha: float) -> int:
    """The smallest number of prompts that can decide each of so many tests, or show any number of
    so many heads; `alpha` is one-sided."""
    return max(MINIMUM, int(np.ceil(np.log2(tests / alpha))))
