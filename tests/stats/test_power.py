"""Power, against the textbook and against itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from attnscope.errors import InputError
from attnscope.stats import power as room
from attnscope.stats.contrast import ContrastSettings, paired_contrast
from attnscope.stats.correction import false_discovery
from attnscope.stats.permute import sign_flip
from attnscope.stats.power import detectable, min_p, power, prompts_needed, threshold
from support_errors import raises


def test_textbook() -> None:
    # Cohen (1988), two-sided, 0.05, power 0.8: 34 pairs for d = 0.5; 64 a group, unpaired. Our test
    # is a little more careful than Student's.
    assert 34 <= prompts_needed(0.5) <= 36
    assert 64 <= prompts_needed(0.5, paired=False) <= 66
    assert prompts_needed(-0.5) == prompts_needed(0.5)
    assert 0.785 < power(0.5, 34) < 0.8078


@pytest.mark.parametrize(("effect", "n"), [(0.2, 12), (0.5, 20), (1.0, 8), (0.1, 300)])
def test_against_scipys_noncentral_t(effect: float, n: int) -> None:
    limit = stats.t.isf(0.025, n - 1)
    far = stats.nct.sf(limit, n - 1, effect * n**0.5) + stats.nct.cdf(
        -limit, n - 1, effect * n**0.5
    )
    spreads = np.sqrt(stats.chi2.ppf(room._SHARES, n - 1) / (n - 1))
    assert room._beyond(limit, effect * n**0.5, spreads) == pytest.approx(far, abs=1e-5)
    if n > room.FEW:  # no more is lost than is left out
        assert power(effect, n) == pytest.approx(far, abs=1e-5)


@pytest.mark.parametrize(("effect", "n"), [(1.2, 7), (0.8, 12), (0.8, 16), (0.5, 34)])
def test_it_is_what_compare_finds(effect: float, n: int) -> None:
    """2,000 data sets of normal differences."""
    d = np.random.default_rng(n).normal(effect, 1, (n, 2000))
    p = paired_contrast(np.zeros_like(d), d, np.arange(2000), ContrastSettings(resamples=5000))["p"]
    assert power(effect, n) == pytest.approx((p <= 0.05).mean(), abs=0.03)


def test_it_is_what_compare_finds_among_many_heads() -> None:
    """12 prompts, where Student's formula says two thirds."""
    found = []
    for seed in range(6):
        d = np.random.default_rng(seed).normal(size=(12, 784))
        d[:, :78] += 1.2
        how = ContrastSettings(resamples=8000)
        q = paired_contrast(np.zeros_like(d), d, np.zeros(784, dtype=int), how)["q"]
        found.append((q[:78] <= 0.05).mean())
    expected = power(1.2, 12, tests=784, effects=78)
    assert expected < 0.6
    assert expected == pytest.approx(np.mean(found), abs=0.08)


@given(st.floats(0.01, 20), st.integers(2, 100_000), st.integers(1, 10_000))
@settings(deadline=None)
def test_power_is_a_share(effect: float, n: int, tests: int) -> None:
    assert 0 <= power(effect, n, tests=tests) <= 1


@given(st.floats(0.1, 2), st.integers(1, 500), st.floats(0.5, 0.95))
@settings(deadline=None, max_examples=20)
def test_the_fewest_prompts_are_enough_and_one_less_is_not(
    effect: float, tests: int, wanted: float
) -> None:
    n = prompts_needed(effect, power=wanted, tests=tests)
    assert power(effect, n, tests=tests) >= wanted
    assert n == 6 or power(effect, n - 1, tests=tests) < wanted


def test_more_tests_need_more_prompts_and_more_effects_fewer() -> None:
    one, among, many = (
        prompts_needed(0.5),
        prompts_needed(0.5, tests=784),
        prompts_needed(0.5, tests=784, effects=78),
    )
    assert one < many < among


def test_threshold_is_bonferronis_for_one_effect() -> None:
    assert threshold(1, tests=784) == pytest.approx(0.05 / 784, rel=0.06)
    assert threshold(1, tests=784, effects=784) == 0.05


def test_nothing_is_found_below_the_floor_of_p() -> None:
    """Of 12 signs the rarest p is 2 / 4096, and one head among 784 needs 0.05 / 784."""
    assert min_p(12) == 2 / 2**12
    assert min_p(6, paired=False) == pytest.approx(2 / 924)
    assert power(5, 12, tests=784, effects=1) == 0
    assert power(2.5, 12, tests=784, effects=5) == 0
    assert power(5, 16, tests=784, effects=1) > 0.9
    assert prompts_needed(5, tests=784) == 15  # 2 / 2**15 is the first below 0.05 / 784
    # The maximum is tested by its own permutations: its min_p is that of one test.
    assert power(2.5, 12, tests=784, effects=5, correction="max") > 0.9
    assert power(5, 5) == 0
    with raises(InputError, "unknown-correction", value="holm"):
        power(0.5, 20, correction="holm")


def test_the_floor_in_a_simulation() -> None:
    """Five heads of 784 with effects of 2.5, and 12 prompts: Benjamini–Hochberg finds nothing,
    the step-down maximum nearly all."""
    found = {"q": 0.0, "p_fwer": 0.0}
    for seed in range(4):
        d = np.random.default_rng(seed).normal(size=(12, 784))
        d[:, :5] += 2.5
        p, stepped = sign_flip(d, family=np.zeros(784, dtype=int))
        found["q"] += (false_discovery(p)[:5] <= 0.05).mean() / 4
        found["p_fwer"] += (stepped[:5] <= 0.05).mean() / 4
    assert found["q"] <= 0.1
    expected = power(2.5, 12, tests=784, effects=5, correction="max")
    assert found["p_fwer"] == pytest.approx(expected, abs=0.15)


def test_clusters() -> None:
    # Without correlation clusters cost degrees of freedom; alike throughout, they are one prompt.
    assert power(0.5, 60, cluster_size=5) < power(0.5, 60)
    assert power(0.5, 60, cluster_size=5, icc=1) == pytest.approx(power(0.5, 12))
    assert prompts_needed(0.5, cluster_size=5, icc=1) == 5 * prompts_needed(0.5)
    assert prompts_needed(0.5, cluster_size=5, icc=0.3) % 5 == 0
    rng = np.random.default_rng(0)
    x = np.sqrt(0.3) * rng.normal(size=(4000, 12, 1)) + np.sqrt(0.7) * rng.normal(
        size=(4000, 12, 5)
    )
    d = x.mean(2).T + 0.5
    p = paired_contrast(np.zeros_like(d), d, np.arange(4000), ContrastSettings(resamples=5000))["p"]
    found = (p <= 0.05).mean()
    assert power(0.5, 60, cluster_size=5, icc=0.3) == pytest.approx(found, abs=0.025)


@given(st.integers(6, 300), st.floats(0.5, 0.95))
@settings(deadline=None, max_examples=20)
def test_the_smallest_effect_is_found(n: int, wanted: float) -> None:
    smallest = detectable(n, power=wanted)
    assert power(smallest, n) >= wanted
    assert power(0.99 * smallest, n) < wanted


def test_too_few_prompts_detect_nothing() -> None:
    assert np.isnan(detectable(5))
    assert np.isnan(detectable(12, tests=784))


def test_bad_input() -> None:
    with raises(InputError, "out-of-range", name="icc", value=1.5):
        power(0.5, 10, icc=1.5)
    with raises(InputError, "out-of-range", name="cluster_size", value=0):
        prompts_needed(0.5, cluster_size=0)
    with raises(InputError, "out-of-range", name="effect"):
        prompts_needed(0)
    with raises(InputError, "out-of-range", name="power", value=80):
        prompts_needed(0.5, power=80)
    with raises(InputError, "out-of-range", name="level", value=5):
        power(0.5, 10, level=5)
    with raises(InputError, "out-of-range", name="effects", value=3):
        power(0.5, 10, tests=2, effects=3)
    with raises(InputError, "effect-too-small"):
        prompts_needed(1e-5)
