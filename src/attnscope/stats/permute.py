"""Runs permutation tests for many columns at once: sign flips of paired differences, and
relabelling of two independent samples, both with the step-down maximum.

A sample is float [n units, m columns]; nan is a unit without a value in that column.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.stats import arrays
from attnscope.stats.arrays import Floats, as_columns, blocks, check, two_samples


def sign_flip(
    differences: ArrayLike,
    *,
    family: ArrayLike | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[Floats, Floats]:
    """Two-sided p of each column [m]: is the mean 0, if every difference may change its sign? And
    the p of the step-down maximum (Westfall and Young 1993) over the columns of its `family`: the
    chance that any column without an effect is called one is at most that, however the columns
    depend on one another. Without families it is nan.

    Every pattern of signs is tried where there are no more than `resamples` of them; else as many
    are drawn, and the data's own pattern counts as one more: p is never 0.
    """
    d = as_columns(differences)
    check(0.95, resamples)
    values = ~np.isnan(d)
    n, m = d.shape
    d = np.where(values, d, 0.0)  # adds nothing with either sign
    if not n or not m:
        return np.full(m, np.nan), np.full(m, np.nan)
    exact = n <= 1000 and 2**n <= resamples
    # A column's flips share their sum of squares, so this orders columns as t does.
    length = np.sqrt((d**2).sum(0))
    length = np.where(length > 0, length, 1.0)
    total = np.abs(d.sum(0))
    as_far = total * (1 - 1e-9) - arrays.SAME * np.abs(d).sum(0)
    order = _ordered(family, total / length)
    alone, together, patterns = np.zeros(m), np.zeros(m), 0
    for signs in _signs(n, exact, resamples, seed, max(1, arrays.HELD // max(n, m))):
        patterns += len(signs)
        flipped = np.abs(signs @ d)
        alone += (flipped >= as_far).sum(0)
        if order:
            flipped /= length
        for of in order:
            together[of] += (_largest(flipped, of) >= as_far[of] / length[of]).sum(0)
    observed_pattern = 0 if exact else 1
    p, stepped = (
        (count + observed_pattern) / (patterns + observed_pattern) for count in (alone, together)
    )
    defined = values.any(0)
    return np.where(defined, p, np.nan), np.where(defined, _steps(stepped, order), np.nan)


def relabel(
    first: ArrayLike,
    second: ArrayLike,
    *,
    family: ArrayLike | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[Floats, Floats]:
    """Two-sided p of each column [m]: are two independent samples' means equal? Welch's t,
    permuted (Janssen 1997): exact if the samples differ in nothing, and right for large ones if
    they differ in spread and size. And the p of the step-down maximum over its `family`, as for
    `sign_flip`. Always drawn, never enumerated.
    """
    a, b = two_samples(first, second)
    check(0.95, resamples)
    pooled = np.concatenate([a, b])
    known = ~np.isnan(pooled)
    n, m = pooled.shape
    enough = (known[: len(a)].sum(0) > 1) & (known[len(a) :].sum(0) > 1)
    if not n or not m:
        return np.full(m, np.nan), np.full(m, np.nan)
    middle = np.where(known, pooled, 0.0).sum(0) / np.maximum(known.sum(0), 1)
    pooled = np.where(known, pooled - middle, 0.0)
    in_b = np.concatenate([np.zeros(len(a)), np.ones(len(b))])
    sums = _Sums(known.astype(float), pooled, pooled**2)
    observed = np.abs(sums.welch(in_b[None]))[0] * (1 - 1e-9)
    order = _ordered(family, observed)
    alone, together = np.zeros(m), np.zeros(m)
    rng = np.random.default_rng(seed)
    for size in blocks(resamples, max(1, arrays.HELD // max(n, m) // 4)):
        t = np.abs(sums.welch(rng.permuted(np.broadcast_to(in_b, (size, n)), axis=1)))
        alone += (t >= observed).sum(0)
        for of in order:
            together[of] += (_largest(t, of) >= observed[of]).sum(0)
    p, stepped = ((count + 1) / (resamples + 1) for count in (alone, together))
    return np.where(enough, p, np.nan), np.where(enough, _steps(stepped, order), np.nan)


def least(n: ArrayLike, resamples: int) -> Floats:
    """The smallest p that sign flips of n units can give."""
    n = np.asarray(n, dtype=float)
    exact = 2.0 ** np.minimum(n, 1000) <= resamples
    return np.asarray(np.where(exact, 2.0 ** (1 - n), 1 / (resamples + 1)))


class _Sums:
    """Sums over the second group for many labellings at once; the first group is the rest."""

    def __init__(self, known: Floats, values: Floats, squares: Floats):
        self.parts = (known, values, squares)
        self.totals = [part.sum(0) for part in self.parts]

    def welch(self, in_b: Floats) -> Floats:
        """Welch's t of each labelling and column; 0 without variance or values."""
        n_b, sum_b, squares_b = (in_b @ part for part in self.parts)
        n_a, sum_a, squares_a = (
            totals - of_b for totals, of_b in zip(self.totals, (n_b, sum_b, squares_b), strict=True)
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            error = sum(
                np.maximum(square - total**2 / n, 0.0) / (n - 1) / n
                for n, total, square in ((n_a, sum_a, squares_a), (n_b, sum_b, squares_b))
            )
            difference = sum_b / n_b - sum_a / n_a
            # Rounding errors of a variance of 0 are far below any real variance.
            scale = arrays.SAME * self.totals[2] / np.maximum(self.totals[0], 1)
            t = np.where(error > scale, difference / np.sqrt(error), np.sign(difference) * np.inf)
        return np.where(np.abs(difference) > np.sqrt(scale), np.nan_to_num(t, posinf=np.inf), 0.0)


def _ordered(family: ArrayLike | None, statistic: Floats) -> list[NDArray[np.intp]]:
    """The columns of each family, largest statistic first."""
    if family is None:
        return []
    numbers = np.asarray(family)
    order = np.lexsort((-statistic, numbers))
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


def _largest(statistic: Floats, of: NDArray[np.intp]) -> Floats:
    """The largest of each column and those after it in the order of a family."""
    return np.asarray(np.maximum.accumulate(statistic[:, of[::-1]], axis=1)[:, ::-1])


def _steps(stepped: Floats, order: list[NDArray[np.intp]]) -> Floats:
    """Make the p-values of the steps increase, as the step-down method requires."""
    monotone = np.full(len(stepped), np.nan)
    for of in order:
        monotone[of] = np.maximum.accumulate(stepped[of])
    return monotone


def _signs(n: int, exact: bool, resamples: int, seed: int, block: int) -> Iterator[Floats]:
    if exact:
        # A pattern and its opposite are equally far from 0, so half of them suffice.
        patterns = np.arange(2 ** (n - 1))
        for at in range(0, len(patterns), block):
            bits = patterns[at : at + block, None] >> np.arange(n) & 1
            yield (1 - 2 * bits).astype(np.float64)
    else:
        rng = np.random.default_rng(seed)
        for size in blocks(resamples, block):
            yield (rng.integers(0, 2, (size, n)) * 2 - 1).astype(np.float64)
