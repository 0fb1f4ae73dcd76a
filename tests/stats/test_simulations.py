"""The promises of the statistics, on data whose truth is known. Data sets are columns, so that
thousands of them are one call; seeds are 0 throughout.
"""

import numpy as np
import pytest
from scipy import stats

from attnscope.stats.power import power
from attnscope.stats.resample import bca, bca_unpaired, false_discovery, relabel, sign_flip

SETS = 2000


def draw(kind: str, n: int, sets: int = SETS, seed: int = 0) -> tuple[np.ndarray, float]:
    """Samples as columns, and their true mean."""
    rng = np.random.default_rng([seed, n])
    if kind == "normal":
        return rng.normal(0.3, 1, (n, sets)), 0.3
    if kind == "gamma":  # skewness 1
        return rng.gamma(4, size=(n, sets)), 4.0
    if kind == "exponential":  # skewness 2
        return rng.exponential(size=(n, sets)), 1.0
    return rng.lognormal(size=(n, sets)), float(np.exp(0.5))  # skewness 6


def covered(kind: str, n: int, **options: bool) -> float:
    x, truth = draw(kind, n)
    low, high = bca(x, resamples=4000, **options)
    return float(((low <= truth) & (truth <= high)).mean())


@pytest.mark.parametrize(
    ("kind", "n"),
    [
        ("normal", 10),
        ("normal", 20),
        ("normal", 100),
        ("gamma", 15),
        ("gamma", 50),
        ("exponential", 30),
        ("exponential", 100),
        ("lognormal", 400),
    ],
)
def test_intervals_cover_the_truth(kind: str, n: int) -> None:
    assert 0.93 <= covered(kind, n) <= 0.97


def test_where_they_do_not() -> None:
    """docs/statistics.md says so: few prompts from a long tail, whatever the method."""
    assert 0.80 <= covered("lognormal", 10) <= 0.90
    assert 0.86 <= covered("exponential", 6) <= 0.92
    # And what scipy's levels would have made of few prompts.
    assert covered("normal", 10, expand=False) < 0.91


def test_intervals_of_two_groups_cover_the_truth() -> None:
    (a, mean_a), (b, mean_b) = draw("normal", 12), draw("gamma", 20)
    low, high = bca_unpaired(a, b, resamples=4000)
    truth = mean_b - mean_a
    assert 0.93 <= ((low <= truth) & (truth <= high)).mean() <= 0.97


@pytest.mark.parametrize("n", [12, 40])
def test_under_the_null_p_is_uniform(n: int) -> None:
    """Exact (12 prompts) and drawn (40), for differences that are symmetric but not normal."""
    d = np.random.default_rng([0, n]).laplace(size=(n, SETS))
    p = sign_flip(d, resamples=5000)
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert 0.04 <= (p <= 0.05).mean() <= 0.06
    assert (p <= 0.01).mean() <= 0.016


def test_under_the_null_p_of_two_groups_is_uniform() -> None:
    rng = np.random.default_rng(0)
    p = relabel(rng.exponential(size=(10, SETS)), rng.exponential(size=(14, SETS)), resamples=2000)
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert 0.04 <= (p <= 0.05).mean() <= 0.06


def discoveries(
    runs: int, heads: int, effects: int, effect: float, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Share of planted heads found, and share of findings that are false, for each run."""
    rng = np.random.default_rng(0)
    shift = np.where(np.arange(heads) < effects, effect, 0.0)
    d = rng.normal(np.tile(shift, runs), 1, (n, runs * heads))
    p = sign_flip(d, resamples=max(10_000, 40 * heads)).reshape(runs, heads)
    found = np.array([false_discovery(one) for one in p]) <= 0.05
    false = found[:, effects:].sum(1) / np.maximum(found.sum(1), 1)
    return found[:, :effects].sum(1) / max(effects, 1), false


def test_planted_effects_are_found_with_the_expected_power() -> None:
    """A tenth of 28 × 28 heads, 10 runs of 40 prompts."""
    heads, effects = 28 * 28, 78
    found, false = discoveries(10, heads, effects, 0.6, 40)
    expected = power(0.6, 40, tests=heads, effects=effects)
    assert 0.6 < expected < 0.95
    # The heads of a run share its threshold, so runs are the unit; the formula is for the t-test.
    error = found.std(ddof=1) / np.sqrt(len(found))
    assert found.mean() == pytest.approx(expected, abs=3 * error + 0.02)
    assert false.mean() <= 0.05 + 3 * false.std(ddof=1) / np.sqrt(len(false))


@pytest.mark.parametrize("effects", [0, 6, 30])
def test_false_discoveries_are_at_most_5_per_cent(effects: int) -> None:
    """2,000 runs of 60 heads and 13 prompts, all signs tried. Benjamini–Hochberg promises 0.05
    times the share of null heads at most; the mean over runs is known to within its own error.
    """
    _, false = discoveries(2000, 60, effects, 1.2, 13)
    promised = 0.05 * (60 - effects) / 60
    error = false.std(ddof=1) / np.sqrt(len(false))
    assert false.mean() <= 0.05 + 2 * error
    assert 0.8 * promised - 2 * error <= false.mean() <= promised + 2 * error
