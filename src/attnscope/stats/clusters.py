"""Means of prompts, or of clusters of similar prompts within strata, and how each unit contributes
to the error of the mean.

A sample is float [prompts, columns]; nan is a prompt without a value. Prompts of one source (a
template, a document) are similar, so the unit is then the cluster. The error is CR2 (Bell and
McCaffrey 2002): it corrects for the share of a large cluster in its own mean. The degrees of
freedom are theirs too.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.errors import InputError, wrong_shape

Floats = NDArray[np.float64]
Labels = NDArray[np.generic]

GROUPS = 5
"""The intraclass correlation needs at least so many groups of two or more prompts."""


@dataclass(frozen=True, slots=True)
class Design:
    """One sample: its mean by column [m], and its units."""

    x: Floats
    """[prompts, columns]"""
    mean: Floats
    values: Floats
    """[units, columns]: the mean over the prompts of a unit; nan where it has no value."""
    sizes: Floats
    """[units, columns]: prompts of a unit."""
    parts: Floats
    """[units, columns]: the sum of their squares is the variance of the mean."""
    degrees: Floats
    prompts: NDArray[np.int64]
    units: NDArray[np.int64]


def as_columns(samples: ArrayLike) -> Floats:
    """Samples as [prompts, columns]; infinite values are refused."""
    x = np.asarray(samples, dtype=float)
    x = x[:, None] if x.ndim == 1 else x
    if x.ndim != 2:
        raise wrong_shape("samples", "[prompts, columns]", x)
    if np.isinf(x).any():
        raise InputError(
            "samples must not be infinite; use nan for an undefined value", code="infinite-value"
        )
    return x


def design_of(
    samples: ArrayLike, cluster: ArrayLike | None = None, strata: ArrayLike | None = None
) -> Design:
    """A sample with its units; `cluster` and `strata` [prompts] are labels."""
    x = as_columns(samples)
    known = ~np.isnan(x)
    names, of = _labels(np.arange(len(x)) if cluster is None else cluster, len(x), "cluster")
    sums, sizes = _grouped(np.where(known, x, 0.0), of), _grouped(known.astype(float), of)
    total, some = sizes.sum(0), sizes > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(total > 0, sums.sum(0) / total, np.nan)
        values = np.where(some, sums / sizes, np.nan)
        residual = np.where(some, sums - mean * sizes, 0.0)
        if strata is None:
            share = np.minimum(sizes / total, 1 - 1e-9)
            parts = residual / total / np.sqrt(1 - share)
            squares = (sizes**2 / (1 - share)).sum(0)
            others = squares**2 - ((sizes**2 / (1 - share)) ** 2).sum(0)
            degrees = total**2 / ((sizes**2).sum(0) + others / total**2)
        else:
            parts, degrees = _within(residual, some, _strata(strata, of, names), total)
    return Design(x, mean, values, sizes, parts, degrees, known.sum(0), some.sum(0))


def _within(
    residual: Floats, some: NDArray[np.bool_], strata: Labels, total: Floats
) -> tuple[Floats, Floats]:
    """Contributions of units less their stratum's mean, and the degrees of freedom."""
    _, of = _labels(strata, len(residual), "strata")
    sizes = _grouped(some.astype(float), of)
    if (sizes == 1).any():
        raise InputError(
            "a stratum has a single unit, so it has no variance; join strata, or leave out strata=",
            code="stratum-too-small",
        )
    mean, stretch = _grouped(residual, of) / sizes, np.sqrt(sizes / (sizes - 1))
    parts = np.where(some, (residual - mean[of]) * stretch[of] / total, 0.0)
    return parts, some.sum(0) - (sizes > 0).sum(0).astype(float)


def intraclass(samples: ArrayLike, cluster: ArrayLike) -> Floats:
    """Intraclass correlation of each column: the share of the variance that lies between clusters
    (one-way analysis of variance). nan with fewer than `GROUPS` clusters of two or more prompts,
    or if nothing varies."""
    x = as_columns(samples)
    known = ~np.isnan(x)
    _, of = _labels(cluster, len(x), "cluster")
    sizes = _grouped(known.astype(float), of)
    total, some = sizes.sum(0), (sizes > 0).sum(0)
    filled = np.where(known, x, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        centred = np.where(known, filled - filled.sum(0) / total, 0.0)
        between = np.where(sizes > 0, _grouped(centred, of) ** 2 / sizes, 0.0).sum(0)
        squares = (centred**2).sum(0)
        of_between = between / (some - 1)
        of_within = np.maximum(squares - between, 0.0) / (total - some)
        size = (total - (sizes**2).sum(0) / total) / (some - 1)
        share = (of_between - of_within) / (of_between + (size - 1) * of_within)
    defined = ((sizes > 1).sum(0) >= GROUPS) & (total > some) & (squares > 0)
    return np.where(defined, share, np.nan)


def _labels(labels: ArrayLike, n: int, what: str) -> tuple[Labels, NDArray[np.intp]]:
    """The distinct labels, and the number of each prompt's."""
    names = np.asarray(labels)
    if names.shape != (n,):
        raise wrong_shape(what, f"one label for each of the {n} prompts", names)
    groups, of = np.unique(names, return_inverse=True)
    return groups, of.reshape(-1)


def _strata(strata: ArrayLike, of: NDArray[np.intp], units: Labels) -> Labels:
    """The stratum of each unit; a unit in several strata is an error."""
    names, which = _labels(strata, len(of), "strata")
    table = np.zeros((of.max(initial=-1) + 1, len(names)), dtype=bool)
    table[of, which] = True
    if (several := np.flatnonzero(table.sum(1) > 1)).size:
        raise InputError(
            f"cluster {units[several[0]]!r} is in several strata "
            f"({', '.join(map(str, names[table[several[0]]]))}); a cluster must be in one stratum",
            code="cluster-in-several-strata",
            cluster=str(units[several[0]]),
        )
    return np.asarray(names[table.argmax(1)])


def _grouped(x: Floats, of: NDArray[np.intp]) -> Floats:
    """Sums over the prompts of each group."""
    sums = np.zeros((of.max(initial=-1) + 1, x.shape[1]))
    if len(of) == len(sums):  # every prompt is its own group
        sums[of] = x
    else:
        np.add.at(sums, of, x)
    return sums
