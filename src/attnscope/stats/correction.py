"""Corrects p-values for multiple tests: per family, over all tests, or at two levels."""

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from attnscope.errors import unknown
from attnscope.stats.arrays import Floats

FAMILIES = ("each", "pooled", "two-level")
"""How families of tests are corrected: each family separately, all tests pooled, or first families
and then the tests within them (two-level)."""


def corrected(p: ArrayLike, family: ArrayLike, how: str = "each") -> Floats:
    """q-values of tests in families; a nan does not count and stays nan."""
    if how not in FAMILIES:
        raise unknown("way to correct families", how, FAMILIES)
    p, family = np.asarray(p, dtype=float), np.asarray(family)
    if how == "pooled":
        return false_discovery(p)
    if how == "two-level":
        return two_level(p, family)
    q = np.full(p.shape, np.nan)
    for number in np.unique(family):
        q[family == number] = false_discovery(p[family == number])
    return q


def false_discovery(p: ArrayLike) -> Floats:
    """Benjamini–Hochberg q-values; a nan does not count and stays nan."""
    p = np.asarray(p, dtype=float)
    q = np.full(p.shape, np.nan)
    known = ~np.isnan(p)
    if known.any():
        q[known] = stats.false_discovery_control(p[known], method="bh")
    return q


def two_level(p: ArrayLike, family: ArrayLike) -> Floats:
    """q-values after Benjamini and Bogomolov (2014), which control the average false discovery rate
    over the selected families.

    Families are selected by their Simes p. Tests in a selected family use the level times the share
    of families selected. q is the smallest level at which a test is significant.
    """
    p, family = np.asarray(p, dtype=float), np.asarray(family)
    numbers = [n for n in np.unique(family) if not np.isnan(p[family == n]).all()]
    within = [false_discovery(p[family == number]) for number in numbers]
    q = np.full(p.shape, np.nan)
    if not numbers:
        return q
    simes = np.array([np.nanmin(some) for some in within])
    of_family = false_discovery(simes)
    steps = np.sort(of_family)
    chosen = np.arange(1, len(steps) + 1)
    for number, some, of_this in zip(numbers, within, of_family, strict=True):
        # At or above the k-th smallest level, k families are selected.
        levels = np.maximum(np.maximum(steps, of_this), some[:, None] * len(steps) / chosen)
        q[family == number] = np.minimum(levels.min(1), 1.0)
    return q
