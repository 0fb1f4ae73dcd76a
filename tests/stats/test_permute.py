"""Permutation tests against scipy, one column at a time, and against the definitions by hand."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from attnscope.stats import arrays as room
from attnscope.stats.permute import least, relabel, sign_flip


def skewed(n: int, m: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(size=(n, m))


def test_exact_sign_flips_are_scipys() -> None:
    d = skewed(11, 6) - 1.2
    p, _ = sign_flip(d)
    for column in range(6):
        theirs = stats.permutation_test(
            (d[:, column],), np.mean, permutation_type="samples", n_resamples=np.inf
        )
        assert p[column] == pytest.approx(theirs.pvalue, abs=1e-9)


@given(
    arrays.arrays(
        float, st.tuples(st.integers(1, 7), st.integers(1, 3)), elements=st.integers(-3, 3)
    )
)
@settings(deadline=None, max_examples=50)
def test_exact_sign_flips_are_the_definition(d: np.ndarray) -> None:
    signs = np.array(list(itertools.product((-1, 1), repeat=len(d))))
    by_hand = (np.abs(signs @ d) >= np.abs(d.sum(0))).mean(0)
    np.testing.assert_allclose(sign_flip(d)[0], by_hand, atol=1e-12)


def test_drawn_sign_flips_are_the_definition() -> None:
    d = skewed(20, 3) - 1.5
    rng = np.random.default_rng(5)
    signs = rng.integers(0, 2, (2000, 20)) * 2 - 1
    by_hand = ((np.abs(signs @ d) >= np.abs(d.sum(0))).sum(0) + 1) / 2001
    np.testing.assert_allclose(sign_flip(d, resamples=2000, seed=5)[0], by_hand, atol=1e-12)


def test_drawn_sign_flips_come_near_the_exact_p() -> None:
    d = skewed(14, 40) - 1.2
    exact, drawn = (sign_flip(d, resamples=n)[0] for n in (2**14, 2**14 - 1))
    error = np.sqrt(exact * (1 - exact) / 2**14) + 1e-4
    assert np.all(np.abs(exact - drawn) < 4.5 * error)


def test_the_step_down_maximum_is_its_definition() -> None:
    """Westfall and Young: the largest column against the maximum of all, the next against that of
    those left, and so on; never smaller than the step before. The statistic is |t|."""
    d = np.random.default_rng(0).normal([0, 0.3, 0.6, 1.2, 2], size=(9, 5))

    def t(x: np.ndarray) -> np.ndarray:
        return np.abs(x.mean(0) / x.std(0, ddof=1))

    flipped = np.array([t(d * np.array(s)[:, None]) for s in itertools.product((-1, 1), repeat=9)])
    order = np.argsort(-t(d))
    by_hand, before = np.empty(5), 0.0
    for step, column in enumerate(order):
        largest = flipped[:, order[step:]].max(1)
        before = max(before, (largest >= t(d)[column] * (1 - 1e-9)).mean())
        by_hand[column] = before
    p, stepped = sign_flip(d, family=[0] * 5)
    np.testing.assert_allclose(stepped, by_hand, atol=1e-12)
    assert (stepped >= p).all()
    assert np.isnan(sign_flip(d)[1]).all()  # of no family


def test_maxima_are_of_a_family() -> None:
    d = skewed(10, 6) - 1.2
    family = [0, 0, 1, 1, 1, 0]
    _, stepped = sign_flip(d, family=family)
    for number in (0, 1):
        of = np.flatnonzero(np.array(family) == number)
        np.testing.assert_allclose(stepped[of], sign_flip(d[:, of], family=of * 0)[1], atol=1e-12)


def welch(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
    errors = a.var(axis, ddof=1) / a.shape[axis] + b.var(axis, ddof=1) / b.shape[axis]
    return np.abs(b.mean(axis) - a.mean(axis)) / np.sqrt(errors)


def test_relabelling_permutes_welchs_t() -> None:
    a, b = skewed(7, 5), 3 * skewed(6, 5, seed=1) - 0.5
    p, _ = relabel(a, b, resamples=20_000)
    for column in range(5):
        theirs = stats.permutation_test(
            (a[:, column], b[:, column]),
            welch,
            vectorized=True,
            alternative="greater",
            n_resamples=np.inf,
        ).pvalue
        assert abs(p[column] - theirs) < 4.5 * np.sqrt(theirs * (1 - theirs) / 20_000) + 1e-4


def test_maxima_of_relabelling() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(10, 8)), rng.normal(size=(12, 8))
    b[:, 0] += 4
    p, stepped = relabel(a, b, family=[0] * 8, resamples=2000)
    assert (stepped >= p - 1e-12).all()
    assert stepped[0] < 0.01
    assert stepped[1:].min() > 0.05
    np.testing.assert_allclose(relabel(a[:, :1], b[:, :1], family=[0], resamples=2000)[1], p[:1])


def test_a_unit_without_a_value_is_left_out_of_its_column_alone() -> None:
    x = skewed(10, 3) - 1.2
    x[[3, 9], 1] = np.nan
    p, _ = sign_flip(x)
    for column in range(3):
        there = x[:, column][~np.isnan(x[:, column])]
        assert p[column] == pytest.approx(sign_flip(there)[0][0], abs=1e-12)
    assert np.isnan(sign_flip(np.full((5, 1), np.nan))[0])
    assert np.isnan(sign_flip(np.empty((0, 2)))).all()


def test_constants() -> None:
    x = np.column_stack([np.full(9, 0.1), np.zeros(9)])
    # All of one sign: of 512 patterns only these signs and their opposites reach as far.
    assert sign_flip(x)[0].tolist() == [2 / 512, 1.0]
    assert relabel(x, x)[0].tolist() == [1.0, 1.0]


def test_the_least_p() -> None:
    rng = np.random.default_rng(0)
    for n, resamples in ((6, 10_000), (12, 10_000), (20, 999)):
        p, _ = sign_flip(10 + rng.normal(size=(n, 1)), resamples=resamples)
        assert p[0] == pytest.approx(float(least(n, resamples)))


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = skewed(25, 9) - 1.2, skewed(20, 9, seed=2)
    how: dict[str, Any] = {"family": [0] * 9, "resamples": 300}
    whole = [*sign_flip(x, **how), *relabel(x, y, **how)]
    monkeypatch.setattr(room, "HELD", 1000)
    parts = [*sign_flip(x, **how), *relabel(x, y, **how)]
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
