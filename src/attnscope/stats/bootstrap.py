"""Computes BCa bootstrap intervals of many columns at once, to detect unreliable t intervals.

All columns use the same resampled units. So a resample is a row of counts, and the means of all
columns are one matrix product. With the same seed, `bca` equals scipy's `bootstrap` at the level of
`expanded` (Hesterberg 2015, arXiv 1411.5279).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from attnscope.stats import arrays as held
from attnscope.stats.arrays import Floats, as_columns, blocks, check

Bools = NDArray[np.bool_]


def bca(
    samples: ArrayLike,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
    expand: bool = True,
) -> tuple[Floats, Floats]:
    """Bias-corrected and accelerated bootstrap interval (Efron 1987) of each column's mean, from 2
    units on, at the level `expanded`, or at `level` itself with `expand=False`. `intervals`
    compares it with Student's t to mark unreliable intervals.
    """
    x = as_columns(samples)
    check(level, resamples)
    degrees = np.maximum((~np.isnan(x)).sum(0) - 1.0, 1.0) if expand else None
    return quantiles(x, degrees, level, resamples, seed)


def expanded(level: float, n: int) -> float:
    """The level for the bootstrap quantiles of n units that gives this coverage."""
    return float(1 - 2 * special.ndtr(-_reach(level, n - 1, n / (n - 1))))


def quantiles(
    x: Floats, degrees: Floats | None, level: float, resamples: int, seed: int
) -> tuple[Floats, Floats]:
    """BCa quantiles; with degrees of freedom they are widened as Student's t is."""
    low, high = np.full(x.shape[1], np.nan), np.full(x.shape[1], np.nan)
    for columns, (rows,) in _same_units((x,), resamples):
        part = x[np.ix_(rows, columns)]
        n = len(part)
        if n < 2:
            continue
        mean = part.mean(0)
        centred = part - mean
        boot = _means(centred, resamples, np.random.default_rng(seed))
        reach: Any = special.ndtri((1 + level) / 2)
        if degrees is not None:
            reach = _reach(level, degrees[columns], n / (n - 1))
        squares, cubes = (centred**2).sum(0), (centred**3).sum(0)
        low[columns], high[columns] = _accelerated(mean, boot, squares, cubes, reach)
        constant = part.min(0) == part.max(0)
        low[columns[constant]] = high[columns[constant]] = np.nan
    return low, high


def quantiles_unpaired(
    a: Floats,
    b: Floats,
    spread: tuple[Floats, Floats, Floats],
    level: float,
    resamples: int,
    seed: int,
) -> tuple[Floats, Floats]:
    """BCa quantiles of the difference of two means; `spread` is its estimate, standard error and
    degrees of freedom."""
    low, high = np.full(a.shape[1], np.nan), np.full(a.shape[1], np.nan)
    for columns, rows in _same_units((a, b), resamples):
        parts = [side[np.ix_(r, columns)] for side, r in zip((a, b), rows, strict=True)]
        if min(map(len, parts)) < 2:
            continue
        estimate, error, degrees = (figure[columns] for figure in spread)
        centred = [part - part.mean(0) for part in parts]
        rng = np.random.default_rng(seed)
        boots = [_means(part, resamples, rng) for part in centred]
        # The moments of a mean's influence add up, each with its sample's size.
        squares = sum((d**2).sum(0) / len(d) ** 2 for d in centred)
        cubes = sum(
            sign * (d**3).sum(0) / len(d) ** 3 for sign, d in zip((-1, 1), centred, strict=True)
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            narrow = np.where(error > 0, error**2 / squares, 1.0)
        low[columns], high[columns] = _accelerated(
            estimate,
            boots[1] - boots[0],
            np.asarray(squares),
            np.asarray(cubes),
            _reach(level, degrees, narrow),
        )
    return low, high


def _same_units(
    samples: tuple[Floats, ...], resamples: int
) -> Iterator[tuple[NDArray[np.intp], list[Bools]]]:
    """Groups of columns that have values for the same units, and those units."""
    known = ~np.isnan(np.concatenate(samples))
    ends = np.cumsum([len(sample) for sample in samples])[:-1]
    _, which = np.unique(np.packbits(known, axis=0), axis=1, return_inverse=True)
    which = which.reshape(-1)
    order = np.argsort(which, kind="stable")
    width = max(1, held.HELD // resamples)
    for group in np.split(order, np.flatnonzero(np.diff(which[order])) + 1):
        if not len(group):
            continue
        rows = np.split(known[:, group[0]], ends)
        for at in range(0, len(group), width):
            yield group[at : at + width], rows


def _means(centred: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Means of resampled units [m, resamples]; the draws are those of scipy's `bootstrap`."""
    n, m = centred.shape
    means = np.empty((m, resamples))
    at = 0
    for size in blocks(resamples, max(1, held.HELD // n)):
        drawn = rng.integers(0, n, (size, n))
        drawn += np.arange(size)[:, None] * n
        counts = np.bincount(drawn.reshape(-1), minlength=size * n).reshape(size, n)
        means[:, at : at + size] = centred.T @ (counts.T / n)
        at += size
    return means


def _reach(level: float, degrees: float | Floats, narrow: float | Floats) -> Floats:
    """The quantile in standard errors: that of t, times a correction for the bootstrap's spread."""
    return np.asarray(np.sqrt(narrow) * stats.t.isf((1 - level) / 2, degrees))


def _accelerated(
    mean: Floats, boot: Floats, squares: Floats, cubes: Floats, reach: Any
) -> tuple[Floats, Floats]:
    """BCa after Efron: `boot` [m, resamples] is the resampled means less the mean."""
    resamples = boot.shape[1]
    boot.sort(axis=1)
    # A resample that is the data in another order equals the mean but for rounding: half below.
    close = held.SAME * np.maximum(-boot[:, 0], boot[:, -1])
    below = np.array([np.searchsorted(b, [-c, c]) for b, c in zip(boot, close, strict=True)])
    share = below.sum(1) / (2 * resamples)
    bias = special.ndtri(share.clip(0.5 / resamples, 1 - 0.5 / resamples))
    with np.errstate(invalid="ignore"):  # constant: 0 / 0, put right by the caller
        acceleration = cubes / squares**1.5 / 6
    ends = []
    for z in (-reach, reach):
        shifted = bias + z
        at = special.ndtr(bias + shifted / (1 - acceleration * shifted)) * (resamples - 1)
        at = np.nan_to_num(at)
        index = np.floor(at).astype(int).clip(0, resamples - 2)
        rows = np.arange(len(boot))
        left, right = boot[rows, index], boot[rows, index + 1]
        ends.append(left + (right - left) * (at - index) + mean)
    return ends[0], ends[1]
