"""The promises of the statistics, on data whose truth is known. Data sets are columns, so that
thousands of them are one call; seeds are 0 throughout. `benchmarks/stats.py` has more sizes, more
distributions and other seeds.

Data sets are drawn by `RandomState`, whose streams numpy never changes: those of `Generator` may be
others in another version.
"""

import numpy as np
import pytest
from numpy.random import RandomState
from scipy import stats

from attnscope.stats.contrast import ContrastSettings, paired_contrast
from attnscope.stats.correction import false_discovery, two_level
from attnscope.stats.intervals import Intervals, intervals, intervals_unpaired, moments, two_sided
from attnscope.stats.permute import relabel, sign_flip
from attnscope.stats.power import power
from attnscope.stats.units import units

pytestmark = pytest.mark.statistics

SETS = 2000


def draw(kind: str, n: int, sets: int = SETS, seed: int = 0) -> tuple[np.ndarray, float]:
    """Samples as columns, and their true mean."""
    rng = RandomState([seed, n])
    shape = (n, sets)
    if kind == "normal":
        return rng.normal(0.3, 1, shape), 0.3
    if kind == "a scale per prompt":
        return rng.normal(size=shape) * rng.lognormal(size=shape), 0.0
    if kind == "t with 3 degrees":
        return rng.standard_t(3, shape), 0.0
    if kind == "paired beta":
        return rng.beta(0.5, 49.5, shape) - rng.beta(0.5, 49.5, shape), 0.0
    if kind == "ties":
        return rng.choice([-1.0, 0.0, 1.0], shape, p=[0.2, 0.6, 0.2]), 0.0
    if kind == "zeros":
        return (rng.random_sample(shape) < 0.2) * rng.exponential(size=shape), 0.2
    if kind == "exponential":  # skewness 2
        return rng.exponential(size=shape), 1.0
    if kind == "beta":  # skewness 2.7
        return rng.beta(0.5, 49.5, shape), 0.01
    return rng.lognormal(size=shape), float(np.exp(0.5))  # skewness 6


def covered(made: Intervals, truth: float) -> float:
    return float(((made.low <= truth) & (truth <= made.high)).mean())


SYMMETRIC = ("normal", "a scale per prompt", "t with 3 degrees", "paired beta", "ties")


@pytest.mark.parametrize("kind", [*SYMMETRIC, "exponential", "beta", "lognormal"])
@pytest.mark.parametrize("n", [12, 24])
def test_intervals_cover_the_truth(kind: str, n: int) -> None:
    x, truth = draw(kind, n)
    # Two standard errors of 2,000 sets beside 93 to 97 %.
    assert 0.92 <= covered(intervals(x, resamples=100), truth) <= 0.98


def test_where_they_do_not() -> None:
    """docs/statistics.md says so: mostly zeros, and the output warns of nearly all of them."""
    x, truth = draw("zeros", 12)
    made = intervals(x, resamples=500)
    there = ~np.isnan(made.low)
    assert 0.8 <= covered(made, truth) <= 0.92  # no interval counts as not covering
    assert made.unreliable[there].mean() > 0.98
    x, _ = draw("lognormal", 12)
    assert intervals(x, resamples=500).unreliable.mean() > 0.65
    x, _ = draw("normal", 12)
    assert intervals(x, resamples=500).unreliable.mean() < 0.12


def test_intervals_of_two_groups_cover_the_truth() -> None:
    (a, mean_a), (b, mean_b) = draw("normal", 12), draw("exponential", 20)
    made = intervals_unpaired(a, b, resamples=100)
    assert 0.93 <= covered(made, mean_b - mean_a) <= 0.97


def clustered(icc: float, sets: int = 1000) -> np.ndarray:
    """12 clusters of 5 prompts, mean 0."""
    rng = RandomState(0)
    shared = np.repeat(rng.normal(size=(12, sets)), 5, axis=0)
    return np.sqrt(icc) * shared + np.sqrt(1 - icc) * rng.normal(size=(60, sets))


@pytest.mark.parametrize("icc", [0.1, 0.5])
def test_clusters_hold_what_prompts_do_not(icc: float) -> None:
    x = clustered(icc)
    assert covered(intervals(x, resamples=100), 0.0) < 0.93
    made = units(x, np.repeat(np.arange(12), 5))
    assert 0.93 <= covered(intervals(made.x, degrees=made.degrees, resamples=100), 0.0) <= 0.98
    p = np.maximum(sign_flip(made.parts)[0], two_sided(moments(made.x)))
    assert (p <= 0.05).mean() <= 0.06


@pytest.mark.parametrize("n", [12, 40])
def test_under_the_null_p_is_uniform(n: int) -> None:
    """Exact (12 prompts) and drawn (40), for differences that are symmetric but not normal."""
    d = RandomState([0, n]).laplace(size=(n, SETS))
    p, _ = sign_flip(d, resamples=5000)
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert 0.04 <= (p <= 0.05).mean() <= 0.06
    assert (p <= 0.01).mean() <= 0.016


@pytest.mark.parametrize("kind", [*SYMMETRIC, "exponential", "beta", "lognormal", "zeros"])
@pytest.mark.parametrize("n", [12, 24])
def test_differences_of_mean_0_are_rarely_called_one(kind: str, n: int) -> None:
    """Skewed ones too, which sign flips alone call one in 7 to 27 % of cases."""
    x, truth = draw(kind, n)
    family = np.arange(x.shape[1])
    p = paired_contrast(np.zeros_like(x), x - truth, family, ContrastSettings(resamples=1000))["p"]
    assert (p <= 0.05).mean() <= 0.06
    if kind in ("exponential", "beta", "lognormal", "zeros"):
        assert (sign_flip(x - truth, resamples=1000)[0] <= 0.05).mean() > 0.065


def test_under_the_null_p_of_two_groups_is_uniform() -> None:
    rng = RandomState(0)
    a, b = rng.exponential(size=(10, SETS)), rng.exponential(size=(14, SETS))
    p, _ = relabel(a, b, resamples=2000)
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert 0.04 <= (p <= 0.05).mean() <= 0.06


def test_groups_of_other_size_and_spread() -> None:
    """Ten prompts of three times the spread against forty: permuting the plain difference of means
    finds one in 26 %."""
    rng = RandomState(0)
    a, b = rng.normal(0, 3, (10, SETS)), rng.normal(size=(40, SETS))
    assert 0.035 <= (relabel(a, b, resamples=1000)[0] <= 0.05).mean() <= 0.065


def discoveries(
    runs: int, heads: int, effects: int, effect: float, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Share of planted heads found, and share of findings that are false, for each run."""
    rng = RandomState(0)
    shift = np.where(np.arange(heads) < effects, effect, 0.0)
    d = rng.normal(np.tile(shift, runs), 1, (n, runs * heads))
    p = sign_flip(d, resamples=max(10_000, 40 * heads))
    p = p[0].reshape(runs, heads)
    found = np.array([false_discovery(one) for one in p]) <= 0.05
    false = found[:, effects:].sum(1) / np.maximum(found.sum(1), 1)
    return found[:, :effects].sum(1) / max(effects, 1), false


def test_planted_effects_are_found_with_the_expected_power() -> None:
    """A tenth of 28 × 28 heads, 6 runs of 40 prompts."""
    heads, effects = 28 * 28, 78
    found, false = discoveries(6, heads, effects, 0.6, 40)
    expected = power(0.6, 40, tests=heads, effects=effects)
    assert 0.6 < expected < 0.95
    # The heads of a run share its threshold, so runs are the unit; the formula is for the t-test.
    error = found.std(ddof=1) / np.sqrt(len(found))
    assert found.mean() == pytest.approx(expected, abs=3 * error + 0.02)
    assert false.mean() <= 0.05 + 3 * false.std(ddof=1) / np.sqrt(len(false))


@pytest.mark.parametrize("effects", [0, 6, 30])
def test_false_discoveries_are_at_most_5_per_cent(effects: int) -> None:
    """1,000 runs of 60 heads and 13 prompts, all signs tried. Benjamini–Hochberg promises 0.05
    times the share of null heads at most; the mean over runs is known to within its own error.
    """
    _, false = discoveries(1000, 60, effects, 1.2, 13)
    promised = 0.05 * (60 - effects) / 60
    error = false.std(ddof=1) / np.sqrt(len(false))
    assert false.mean() <= 0.05 + 2 * error
    assert 0.8 * promised - 2 * error <= false.mean() <= promised + 2 * error


def test_the_maximum_is_rarely_false_however_heads_depend() -> None:
    """1,000 runs of 30 heads without effects, independent and nearly the same."""
    rng = RandomState(0)
    for correlation in (0.0, 0.9):
        shared = np.repeat(rng.normal(size=(12, 1000)), 30, axis=1)
        own = rng.normal(size=(12, 30_000))
        d = np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own
        _, stepped = sign_flip(d, family=np.arange(30_000) // 30)
        some = (stepped.reshape(1000, 30) <= 0.05).any(1).mean()
        assert 0.03 <= some <= 0.07


def test_two_levels_control_what_is_declared_over_families() -> None:
    """24 families of 60 heads, 6 real heads in one. Of all that is declared, more than a tenth is
    false if each family is corrected by itself."""
    rng = RandomState(0)
    family = np.repeat(np.arange(24), 60)
    false = {"each": [], "two-level": []}  # type: ignore[var-annotated]
    for _ in range(200):
        z = rng.normal(size=1440)
        z[:6] += 5
        p = 2 * stats.norm.sf(np.abs(z))
        apart = np.concatenate([false_discovery(part) for part in np.split(p, 24)])
        for how, q in (("each", apart), ("two-level", two_level(p, family))):
            found = q <= 0.05
            false[how].append(found[6:].sum() / max(found.sum(), 1))
    assert np.mean(false["each"]) > 0.1
    assert np.mean(false["two-level"]) <= 0.06
