"""Many tests at once: against scipy, and against the procedures by hand."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from attnscope.errors import InputError
from attnscope.stats.correction import corrected, false_discovery, two_level
from support_errors import raises


def test_false_discovery_is_scipys_and_leaves_nan_alone() -> None:
    p = np.array([0.001, 0.04, np.nan, 0.03, 0.9])
    q = false_discovery(p)
    assert np.isnan(q[2])
    expected = stats.false_discovery_control(p[[0, 1, 3, 4]])
    np.testing.assert_allclose(q[[0, 1, 3, 4]], expected, atol=1e-12)
    # By hand: p times tests over rank, made monotone from the top.
    np.testing.assert_allclose(q[[0, 1, 3, 4]], [0.004, 0.16 / 3, 0.16 / 3, 0.9])
    assert np.isnan(false_discovery([np.nan, np.nan])).all()


def found_by_hand(p: np.ndarray, family: np.ndarray, level: float) -> np.ndarray:
    """Benjamini and Bogomolov's two steps, as they are written."""
    numbers = np.unique(family)
    simes = [
        (
            np.sort(p[family == n]) * np.sum(family == n) / np.arange(1, np.sum(family == n) + 1)
        ).min()
        for n in numbers
    ]
    chosen = stats.false_discovery_control(np.minimum(simes, 1)) <= level
    found = np.zeros(len(p), dtype=bool)
    for number in numbers[chosen]:
        own = stats.false_discovery_control(p[family == number])
        found[family == number] = own <= level * chosen.sum() / len(numbers)
    return found


@given(st.integers(0, 10_000), st.integers(1, 6), st.floats(0.01, 0.3))
@settings(deadline=None, max_examples=60)
def test_two_levels_are_the_procedure(seed: int, families: int, level: float) -> None:
    rng = np.random.default_rng(seed)
    family = np.sort(rng.integers(0, families, 24))
    p = rng.uniform(size=24) ** (1 + 3 * (family % 2))
    q = two_level(p, family)
    clear = np.abs(q - level) > 1e-9
    np.testing.assert_array_equal((q <= level)[clear], found_by_hand(p, family, level)[clear])


def test_families_apart_or_pooled() -> None:
    p, family = np.array([0.01, 0.04, 0.02, np.nan, 0.9]), np.array([0, 0, 1, 1, 1])
    apart = corrected(p, family)
    np.testing.assert_allclose(apart[:2], stats.false_discovery_control(p[:2]))
    np.testing.assert_allclose(apart[[2, 4]], stats.false_discovery_control(p[[2, 4]]))
    pooled = corrected(p, family, "pooled")
    np.testing.assert_allclose(pooled[[0, 1, 2, 4]], stats.false_discovery_control(p[[0, 1, 2, 4]]))
    assert np.isnan(corrected(p, family, "two-level")[3])
    assert np.isnan(two_level([np.nan], [0])).all()
    with raises(InputError, "unknown-way-to-correct-families", value="all"):
        corrected(p, family, "all")
