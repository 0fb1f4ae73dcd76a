"""Resampling over prompts, for many columns at once: BCa intervals, permutation tests, and the
false discovery rate. Knows arrays only: no tables, no heads, no models.

A sample is float [n prompts, m columns]. All columns see the same resampled prompts, so that a
resample is a row of counts and the means of all columns are one matrix product; scipy's
`bootstrap` gathers n × m numbers per resample instead. Given the same seed the intervals are those
of `scipy.stats.bootstrap(..., method="BCa")`, at the level that `expanded` gives.

A bootstrap of a mean is too narrow for few prompts: by sqrt((n - 1) / n), because it resamples
about the sample's own mean, and because it uses the normal's quantiles where the spread is itself
an estimate. So quantiles are taken farther out, where they would be if the prompts were normal
(Hesterberg 2015, arXiv 1411.5279, and the default of his R package `resample`).

nan is a prompt without a value in that column: it is left out there, and there alone. A column
with fewer than two values has no interval, one without values no p-value: nan.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from attnscope.errors import InputError

__all__ = ["bca", "bca_unpaired", "expanded", "false_discovery", "relabel", "sign_flip"]

Floats = NDArray[np.float64]

# Numbers held at a time (64 MiB), whatever the number of columns, prompts and resamples.
HELD = 2**23
# Sums of the same numbers in another order differ by rounding; as far as this they are equal.
SAME = 1e-12


def expanded(level: float, n: int) -> float:
    """The level at which the quantiles of n prompts' bootstrap have to be taken for this one."""
    return float(1 - 2 * special.ndtr(-_reach(level, n - 1, n / (n - 1))))


def bca(
    samples: ArrayLike,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
    expand: bool = True,
) -> tuple[Floats, Floats]:
    """Bias-corrected and accelerated bootstrap interval of each column's mean: low, high [m].

    A constant column has the interval of its one value. `expand=False` leaves quantiles where
    scipy has them: too near for few prompts.
    """
    x = _columns(samples)
    _settings(level, resamples)
    low, high = np.full(x.shape[1], np.nan), np.full(x.shape[1], np.nan)
    for columns, (rows,) in _alike((x,), resamples):
        part = x[np.ix_(rows, columns)]
        if len(part) < 2:
            continue
        mean = part.mean(0)
        centred = part - mean
        rng = np.random.default_rng(seed)
        boot = _means(centred, resamples, rng)
        squares, cubes = (centred**2).sum(0), (centred**3).sum(0)
        n = len(part)
        reach = _reach(level, n - 1, n / (n - 1)) if expand else special.ndtri((1 + level) / 2)
        low[columns], high[columns] = _interval(mean, boot, squares, cubes, reach)
        constant = part.min(0) == part.max(0)
        low[columns[constant]] = high[columns[constant]] = part[0, constant]
    return low, high


def bca_unpaired(
    first: ArrayLike,
    second: ArrayLike,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
    expand: bool = True,
) -> tuple[Floats, Floats]:
    """The same for the difference of two independent samples' means, second less first."""
    a, b = _two(first, second)
    _settings(level, resamples)
    low, high = np.full(a.shape[1], np.nan), np.full(a.shape[1], np.nan)
    for columns, (rows_a, rows_b) in _alike((a, b), resamples):
        parts = [a[np.ix_(rows_a, columns)], b[np.ix_(rows_b, columns)]]
        if min(map(len, parts)) < 2:
            continue
        means = [part.mean(0) for part in parts]
        centred = [part - mean for part, mean in zip(parts, means, strict=True)]
        rng = np.random.default_rng(seed)
        boots = [_means(part, resamples, rng) for part in centred]
        # The second moments of a mean's influence add up, each with its sample's size.
        squares = sum((d**2).sum(0) / len(d) ** 2 for d in centred)
        cubes = sum(
            sign * (d**3).sum(0) / len(d) ** 3 for sign, d in zip((-1, 1), centred, strict=True)
        )
        difference = means[1] - means[0]
        reach = _welch(centred, level) if expand else special.ndtri((1 + level) / 2)
        low[columns], high[columns] = _interval(
            difference, boots[1] - boots[0], np.asarray(squares), np.asarray(cubes), reach
        )
        constant = (np.ptp(parts[0], 0) == 0) & (np.ptp(parts[1], 0) == 0)
        point = parts[1][0, constant] - parts[0][0, constant]
        low[columns[constant]] = high[columns[constant]] = point
    return low, high


def sign_flip(differences: ArrayLike, *, resamples: int = 10_000, seed: int = 0) -> Floats:
    """Two-sided p of each column [m]: is the mean 0, if every difference may change its sign?

    Every pattern of signs is tried where there are no more than `resamples` of them; else as many
    are drawn, and the data's own pattern counts as one more: p is never 0.
    """
    d = _columns(differences)
    _settings(0.95, resamples)
    values = np.isfinite(d)
    n = len(d)
    d = np.where(values, d, 0.0)  # whatever its sign, it adds nothing

    def draw() -> Iterator[Floats]:
        if exact:
            # A pattern and its opposite are equally far from 0: half of them will do.
            patterns = np.arange(2 ** (n - 1))
            for at in range(0, len(patterns), block):
                bits = patterns[at : at + block, None] >> np.arange(n) & 1
                yield (1 - 2 * bits).astype(np.float64)
        else:
            rng = np.random.default_rng(seed)
            for size in _blocks(resamples, block):
                yield (rng.integers(0, 2, (size, n)) * 2 - 1).astype(np.float64)

    exact = 1 <= n <= 1000 and 2**n <= resamples
    block = max(1, HELD // max(n, 1))
    p = _p(d, draw, resamples=None if exact else resamples)
    return np.where(values.any(0), p, np.nan)


def relabel(
    first: ArrayLike, second: ArrayLike, *, resamples: int = 10_000, seed: int = 0
) -> Floats:
    """Two-sided p of each column [m]: are two independent samples' means equal, if every prompt
    might have been in either? Always drawn, never enumerated.
    """
    a, b = _two(first, second)
    _settings(0.95, resamples)
    p = np.full(a.shape[1], np.nan)
    for columns, (rows_a, rows_b) in _alike((a, b), resamples):
        n_a, n_b = int(rows_a.sum()), int(rows_b.sum())
        if not n_a or not n_b:
            continue
        pooled = np.concatenate([a[np.ix_(rows_a, columns)], b[np.ix_(rows_b, columns)]])
        pooled = pooled - pooled.mean(0)
        weights = np.concatenate([np.full(n_a, -1 / n_a), np.full(n_b, 1 / n_b)])

        def draw(weights: Floats = weights) -> Iterator[Floats]:
            rng = np.random.default_rng(seed)
            for size in _blocks(resamples, max(1, HELD // len(weights))):
                yield rng.permuted(np.broadcast_to(weights, (size, len(weights))), axis=1)

        p[columns] = _p(pooled, draw, resamples=resamples, observed=weights @ pooled)
    return p


def false_discovery(p: ArrayLike) -> Floats:
    """Benjamini–Hochberg q-values; a nan stands outside the family and stays nan."""
    p = np.asarray(p, dtype=float)
    q = np.full(p.shape, np.nan)
    known = ~np.isnan(p)
    if known.any():
        q[known] = stats.false_discovery_control(p[known], method="bh")
    return q


def _columns(samples: ArrayLike) -> Floats:
    x = np.asarray(samples, dtype=float)
    if x.ndim == 1:
        x = x[:, None]
    if x.ndim != 2:
        raise InputError(f"samples are [prompts, columns]; got the shape {list(x.shape)}")
    if np.isinf(x).any():
        raise InputError("an infinite value has no mean; use nan where a value is not defined")
    return x


def _two(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    a, b = _columns(first), _columns(second)
    if a.shape[1] != b.shape[1]:
        raise InputError(
            f"two samples of the same columns are compared; got {a.shape[1]} and {b.shape[1]}"
        )
    return a, b


def _settings(level: float, resamples: int) -> None:
    if not 0 < level < 1:
        raise InputError(f"level={level!r}: the level of an interval lies between 0 and 1")
    if resamples < 100:
        raise InputError(f"resamples={resamples!r}: fewer than 100 say nothing about tails")


def _alike(
    samples: tuple[Floats, ...], resamples: int
) -> Iterator[tuple[NDArray[np.intp], list[NDArray[np.bool_]]]]:
    """Columns with values for the same prompts, a bearable number at a time, and those prompts."""
    known = ~np.isnan(np.concatenate(samples))
    ends = np.cumsum([len(sample) for sample in samples])[:-1]
    _, which = np.unique(np.packbits(known, axis=0), axis=1, return_inverse=True)
    which = which.reshape(-1)
    order = np.argsort(which, kind="stable")
    width = max(1, HELD // resamples)
    for group in np.split(order, np.flatnonzero(np.diff(which[order])) + 1):
        if not len(group):
            continue
        rows = np.split(known[:, group[0]], ends)
        for at in range(0, len(group), width):
            yield group[at : at + width], rows


def _blocks(total: int, size: int) -> Iterator[int]:
    for at in range(0, total, size):
        yield min(size, total - at)


def _means(centred: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Means of resampled prompts [m, resamples]; the draws are those of scipy's `bootstrap`."""
    n, m = centred.shape
    means = np.empty((m, resamples))
    at = 0
    for size in _blocks(resamples, max(1, HELD // n)):
        drawn = rng.integers(0, n, (size, n))
        drawn += np.arange(size)[:, None] * n
        counts = np.bincount(drawn.reshape(-1), minlength=size * n).reshape(size, n)
        means[:, at : at + size] = centred.T @ (counts.T / n)
        at += size
    return means


def _reach(level: float, degrees: float | Floats, narrow: float | Floats) -> Floats:
    """How far out quantiles are taken: t's, times what the bootstrap's spread falls short by."""
    return np.asarray(np.sqrt(narrow) * stats.t.isf((1 - level) / 2, degrees))


def _welch(centred: list[Floats], level: float) -> Floats:
    """The same for the difference of two means, with Welch's degrees of freedom, by column."""
    spread = [(d**2).sum(0) / (len(d) - 1) / len(d) for d in centred]
    plugged = [(d**2).sum(0) / len(d) / len(d) for d in centred]
    total = spread[0] + spread[1]
    with np.errstate(invalid="ignore", divide="ignore"):  # both constant: put right by the caller
        degrees = total**2 / sum(s**2 / (len(d) - 1) for s, d in zip(spread, centred, strict=True))
        narrow = total / (plugged[0] + plugged[1])
    some = total > 0
    return _reach(level, np.where(some, degrees, 1.0), np.where(some, narrow, 1.0))


def _interval(
    mean: Floats, boot: Floats, squares: Floats, cubes: Floats, reach: Any
) -> tuple[Floats, Floats]:
    """BCa after Efron: `boot` [m, resamples] is the resampled means less the mean."""
    resamples = boot.shape[1]
    boot.sort(axis=1)
    # A resample that is the data in another order equals the mean but for rounding: half below.
    close = SAME * np.maximum(-boot[:, 0], boot[:, -1])
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
        whole = np.floor(at).astype(int).clip(0, resamples - 2)
        ends.append(_between(boot, whole, at - whole) + mean)
    return ends[0], ends[1]


def _between(boot: Floats, whole: NDArray[Any], part: Floats) -> Floats:
    rows = np.arange(len(boot))
    left, right = boot[rows, whole], boot[rows, whole + 1]
    return np.asarray(left + (right - left) * part)


def _p(
    d: Floats,
    draw: Callable[[], Iterator[Floats]],
    *,
    resamples: int | None,
    observed: Floats | None = None,
) -> Floats:
    """The share of patterns whose sum is as far from 0 as the data's own."""
    total = d.sum(0) if observed is None else observed
    as_far = np.abs(total) * (1 - 1e-9) - SAME * np.abs(d).sum(0)
    count, patterns = np.zeros(d.shape[1]), 0
    for signs in draw():
        patterns += len(signs)
        for at in range(0, d.shape[1], width := max(1, HELD // len(signs))):
            part = slice(at, at + width)
            count[part] += (np.abs(signs @ d[:, part]) >= as_far[part]).sum(0)
    return count / patterns if resamples is None else (count + 1) / (resamples + 1)
