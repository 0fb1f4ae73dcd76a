"""Turns prompts into resampling units: prompts, or clusters of similar prompts, within strata.

Prompts of one source (a template, a document) are similar, so n of them carry less information than
n independent prompts. `units` turns [prompts, columns] into [units, columns], whose mean is that of
the prompts and whose variance is that of the clusters. For nested clusters the outermost are the
units. Strata remove the variance between them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.errors import InputError
from attnscope.stats.arrays import Floats, as_columns, informative_units


@dataclass(frozen=True, slots=True)
class Units:
    """A sample of units; nan where a unit has no value in a column."""

    x: Floats
    """[units, columns]: the mean, plus the unit's influence on it."""
    parts: Floats
    """[units, columns]: the units' parts of the mean, whose signs may change together."""
    degrees: Floats
    """[columns], of freedom."""
    n: NDArray[np.int64]
    """[columns]: units with a value."""
    informative: NDArray[np.int64]
    """[columns]: of these, where more than half have one value, those that differ from it."""


def units(
    samples: ArrayLike, cluster: ArrayLike | None = None, strata: ArrayLike | None = None
) -> Units:
    """Samples [prompts, columns] as units; `cluster` and `strata` [prompts] are labels."""
    x = as_columns(samples)
    known = ~np.isnan(x)
    if cluster is None:
        values, parts, layers = x, x, None if strata is None else np.asarray(strata)
    else:
        groups, of = _labels(cluster, len(x), "cluster")
        sums, sizes = _grouped(np.where(known, x, 0.0), of), _grouped(known.astype(float), of)
        total, some = sizes.sum(0), sizes > 0
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.where(total > 0, sums.sum(0) / total, np.nan)
            scale = some.sum(0) / total
            parts = np.where(some, sums * scale, np.nan)
            values = np.where(some, mean + (sums - mean * sizes) * scale, np.nan)
        layers = None if strata is None else _of_groups(strata, of, len(groups), groups)
    defined = ~np.isnan(values)
    n = defined.sum(0)
    if layers is None:
        return Units(values, parts, n - 1.0, n, informative_units(parts))
    return Units(*_within(values, layers), n, informative_units(parts))


def intraclass(samples: ArrayLike, cluster: ArrayLike) -> Floats:
    """Intraclass correlation of each column: the share of the variance that lies between clusters
    (one-way analysis of variance). nan where no cluster has two values, or nothing varies.
    """
    x = as_columns(samples)
    known = ~np.isnan(x)
    _, of = _labels(cluster, len(x), "cluster")
    sizes = _grouped(known.astype(float), of)
    total, some = sizes.sum(0), (sizes > 0).sum(0)
    filled = np.where(known, x, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        centred = np.where(known, filled - filled.sum(0) / total, 0.0)
        sums = _grouped(centred, of)
        between = np.where(sizes > 0, sums**2 / sizes, 0.0).sum(0)
        total_squares = (centred**2).sum(0)
        of_between = between / (some - 1)
        of_within = np.maximum(total_squares - between, 0.0) / (total - some)
        size = (total - (sizes**2).sum(0) / total) / (some - 1)
        share = (of_between - of_within) / (of_between + (size - 1) * of_within)
    defined = (some > 1) & (total > some) & (total_squares > 0)
    return np.where(defined, share, np.nan)


def design_effect(samples: ArrayLike, sample: Units) -> Floats:
    """How many times larger the variance of a mean is for these units than it would be for as many
    independent prompts."""
    x = as_columns(samples)
    n = (~np.isnan(x)).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        plain = _squares(x) / n / (n - 1)
        actual = _squares(sample.x) / sample.n / (sample.n - 1)
        return np.where((plain > 0) & (n > 1) & (sample.n > 1), actual / plain, np.nan)


def explained(samples: ArrayLike, label: ArrayLike) -> float:
    """The median, over columns, of the share of variance that a label explains. nan if there is
    one group, or no group has two prompts."""
    names = np.asarray(label)
    if len(np.unique(names)) in (1, len(names)):
        return float("nan")
    shares = intraclass(samples, names)
    shares = shares[~np.isnan(shares)]
    return float(np.median(shares)) if len(shares) else float("nan")


def _within(values: Floats, layers: NDArray[np.generic]) -> tuple[Floats, Floats, Floats]:
    """Units less their stratum's mean, scaled so that the plain formula of a mean's error gives
    the stratified one; and the degrees of freedom."""
    _, of = _labels(layers, len(values), "strata")
    defined = ~np.isnan(values)
    sizes = _grouped(defined.astype(float), of)
    n = defined.sum(0)
    if (sizes == 1).any():
        raise InputError(
            "a stratum has a single unit, so it has no variance; join strata, or leave out strata=",
            code="stratum-too-small",
        )
    filled = np.where(defined, values, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = filled.sum(0) / n
        of_stratum = _grouped(filled, of) / sizes
        stretch = np.sqrt((n - 1) / n * sizes / (sizes - 1))
    values_within = np.where(defined, mean + (filled - of_stratum[of]) * stretch[of], np.nan)
    return values_within, values_within, n - (sizes > 0).sum(0).astype(float)


def _labels(labels: ArrayLike, n: int, what: str) -> tuple[NDArray[np.generic], NDArray[np.intp]]:
    names = np.asarray(labels)
    if names.shape != (n,):
        raise InputError(
            f"{what} needs one label for each of the {n} prompts; got the shape {names.shape}",
            code="bad-shape",
            shape=names.shape,
        )
    groups, of = np.unique(names, return_inverse=True)
    return groups, of.reshape(-1)


def _of_groups(
    strata: ArrayLike, of: NDArray[np.intp], count: int, groups: NDArray[np.generic]
) -> NDArray[np.generic]:
    """The stratum of each cluster; a cluster in several strata is an error."""
    names, which = _labels(strata, len(of), "strata")
    table = np.zeros((count, len(names)), dtype=bool)
    table[of, which] = True
    if (several := np.flatnonzero(table.sum(1) > 1)).size:
        raise InputError(
            f"cluster {groups[several[0]]!r} is in several strata "
            f"({', '.join(map(str, names[table[several[0]]]))}); a cluster must be in one stratum",
            code="cluster-in-several-strata",
            cluster=str(groups[several[0]]),
        )
    return np.asarray(names[table.argmax(1)])


def _grouped(x: Floats, of: NDArray[np.intp]) -> Floats:
    sums = np.zeros((of.max(initial=-1) + 1, x.shape[1]))
    np.add.at(sums, of, x)
    return sums


def _squares(x: Floats) -> Floats:
    known = ~np.isnan(x)
    n = np.maximum(known.sum(0), 1)
    mean = np.where(known, x, 0.0).sum(0) / n
    return np.asarray((np.where(known, x - mean, 0.0) ** 2).sum(0))
