"""Resampling against scipy, called once per column, and against the definitions by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from attnscope.errors import InputError
from attnscope.stats import resample
from attnscope.stats.resample import (
    bca,
    bca_unpaired,
    expanded,
    false_discovery,
    relabel,
    sign_flip,
)


def skewed(n: int, m: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(size=(n, m))


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("n", [12, 40, 101])
def test_bca_is_scipys(n: int, expand: bool) -> None:
    x = skewed(n, 5)
    low, high = bca(x, resamples=999, seed=7, level=0.9, expand=expand)
    for column in range(5):
        theirs = stats.bootstrap(
            (x[:, column],),
            np.mean,
            n_resamples=999,
            confidence_level=expanded(0.9, n) if expand else 0.9,
            method="BCa",
            rng=np.random.default_rng(7),
        ).confidence_interval
        assert low[column] == pytest.approx(theirs.low, abs=1e-9)
        assert high[column] == pytest.approx(theirs.high, abs=1e-9)


def test_bca_of_two_samples_is_scipys() -> None:
    a, b = skewed(23, 4), skewed(31, 4, seed=1)
    low, high = bca_unpaired(a, b, resamples=999, seed=7, expand=False)
    for column in range(4):
        theirs = stats.bootstrap(
            (a[:, column], b[:, column]),
            lambda a, b, axis: b.mean(axis) - a.mean(axis),
            n_resamples=999,
            method="BCa",
            rng=np.random.default_rng(7),
        ).confidence_interval
        assert low[column] == pytest.approx(theirs.low, abs=1e-9)
        assert high[column] == pytest.approx(theirs.high, abs=1e-9)


def test_quantiles_are_taken_farther_out_for_few_prompts() -> None:
    # z at the expanded level, times what the bootstrap falls short by, is t.
    for n in (5, 10, 20, 100):
        z = stats.norm.isf((1 - expanded(0.95, n)) / 2)
        assert z * np.sqrt((n - 1) / n) == pytest.approx(stats.t.isf(0.025, n - 1), abs=1e-9)
    assert expanded(0.95, 10**6) == pytest.approx(0.95, abs=1e-6)
    # Equal spread, equal sizes: Welch's degrees of freedom are 2 n - 2.
    x = np.random.default_rng(0).normal(size=(9, 1))
    far = resample._welch([x - x.mean(), x - x.mean()], 0.95)
    assert far[0] == pytest.approx(np.sqrt(9 / 8) * stats.t.isf(0.025, 16), abs=1e-12)


def test_ties_count_half() -> None:
    # Whole numbers add up exactly, so scipy sees the ties that rounding usually hides from it.
    x = np.array([0, 1, 1, 3, 8, 1, 2.0])
    low, high = bca(x, resamples=2000, seed=1, expand=False)
    theirs = stats.bootstrap(
        (x,), np.mean, n_resamples=2000, method="BCa", rng=np.random.default_rng(1)
    ).confidence_interval
    assert (low[0], high[0]) == pytest.approx((theirs.low, theirs.high), abs=1e-9)
    # The same numbers where sums round: an interval moves with its data.
    low_moved, high_moved = bca(x * 0.1 + 0.7, resamples=2000, seed=1, expand=False)
    assert low_moved[0] == pytest.approx(low[0] * 0.1 + 0.7, abs=1e-9)
    assert high_moved[0] == pytest.approx(high[0] * 0.1 + 0.7, abs=1e-9)


def test_exact_sign_flips_are_scipys() -> None:
    d = skewed(11, 6) - 1.2
    p = sign_flip(d)
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
    np.testing.assert_allclose(sign_flip(d), by_hand, atol=1e-12)


def test_drawn_sign_flips_are_the_definition() -> None:
    d = skewed(20, 3) - 1.5
    rng = np.random.default_rng(5)
    signs = rng.integers(0, 2, (2000, 20)) * 2 - 1
    by_hand = ((np.abs(signs @ d) >= np.abs(d.sum(0))).sum(0) + 1) / 2001
    np.testing.assert_allclose(sign_flip(d, resamples=2000, seed=5), by_hand, atol=1e-12)


def test_drawn_sign_flips_come_near_the_exact_p() -> None:
    d = skewed(14, 40) - 1.2
    exact, drawn = sign_flip(d, resamples=2**14), sign_flip(d, resamples=2**14 - 1)
    error = np.sqrt(exact * (1 - exact) / 2**14) + 1e-4
    assert np.all(np.abs(exact - drawn) < 4.5 * error)


def test_relabelling_comes_near_scipys_exact_p() -> None:
    a, b = skewed(7, 5), skewed(6, 5, seed=1) + 0.8
    p = relabel(a, b, resamples=20_000)
    for column in range(5):
        theirs = stats.permutation_test(
            (a[:, column], b[:, column]),
            lambda a, b, axis: np.abs(b.mean(axis) - a.mean(axis)),
            vectorized=True,
            alternative="greater",
            n_resamples=np.inf,
        ).pvalue
        assert abs(p[column] - theirs) < 4.5 * np.sqrt(theirs * (1 - theirs) / 20_000)


def test_a_prompt_without_a_value_is_left_out_of_its_column_alone() -> None:
    x = skewed(30, 4) - 1.2
    x[[3, 9], 1] = np.nan
    x[[3, 5, 11], 2] = np.nan
    low, high = bca(x, resamples=500)
    p = sign_flip(x[:10])
    for column in range(4):
        there = x[:, column][~np.isnan(x[:, column])]
        alone = bca(there, resamples=500)
        assert (low[column], high[column]) == pytest.approx((alone[0][0], alone[1][0]), abs=1e-12)
        ten = x[:10, column]
        assert p[column] == pytest.approx(sign_flip(ten[~np.isnan(ten)])[0], abs=1e-12)
    a, b = x[:15], x[15:]
    unpaired = bca_unpaired(a, b, resamples=500)
    for column in range(4):
        one, two = (s[:, column][~np.isnan(s[:, column])] for s in (a, b))
        alone = bca_unpaired(one, two, resamples=500)
        assert unpaired[0][column] == pytest.approx(alone[0][0], abs=1e-12)


def test_a_column_without_values() -> None:
    x = np.array([[1.0, np.nan, np.nan], [2.0, np.nan, 3.0]])
    low, high = bca(x)
    assert np.isfinite(low[0])
    assert np.isnan([low[1:], high[1:]]).all()
    assert np.isnan(sign_flip(x)[1])
    assert bca(np.empty((5, 0)))[0].shape == (0,)
    assert sign_flip(np.empty((0, 2))).tolist() == pytest.approx([np.nan] * 2, nan_ok=True)


def test_constant_columns_have_a_point_for_an_interval() -> None:
    x = np.column_stack([np.full(9, 0.1), np.zeros(9)])
    low, high = bca(x)
    assert low.tolist() == high.tolist() == [0.1, 0.0]
    # All of one sign: of 512 patterns only these signs and their opposites reach as far.
    assert sign_flip(x).tolist() == [2 / 512, 1.0]
    assert bca_unpaired(x, x + 1)[0].tolist() == [1.0, 1.0]
    assert relabel(x, x).tolist() == [1.0, 1.0]


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x = skewed(25, 9) - 1.2
    y = skewed(20, 9, seed=2)
    whole = [
        *bca(x, resamples=300),
        sign_flip(x, resamples=300),
        *bca_unpaired(x, y, resamples=300),
    ]
    whole.append(relabel(x, y, resamples=300))
    monkeypatch.setattr(resample, "HELD", 1000)
    parts = [
        *bca(x, resamples=300),
        sign_flip(x, resamples=300),
        *bca_unpaired(x, y, resamples=300),
    ]
    parts.append(relabel(x, y, resamples=300))
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_false_discovery_is_scipys_and_leaves_nan_alone() -> None:
    p = np.array([0.001, 0.04, np.nan, 0.03, 0.9])
    q = false_discovery(p)
    assert np.isnan(q[2])
    expected = stats.false_discovery_control(p[[0, 1, 3, 4]])
    np.testing.assert_allclose(q[[0, 1, 3, 4]], expected, atol=1e-12)
    # By hand: p times tests over rank, made monotone from the top.
    np.testing.assert_allclose(q[[0, 1, 3, 4]], [0.004, 0.16 / 3, 0.16 / 3, 0.9])
    assert np.isnan(false_discovery([np.nan, np.nan])).all()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: bca(np.zeros((2, 2, 2))), r"\[2, 2, 2\]"),
        (lambda: bca([1.0, np.inf]), "infinite"),
        (lambda: bca([1.0, 2.0], level=95), "between 0 and 1"),
        (lambda: sign_flip([1.0, 2.0], resamples=10), "fewer than 100"),
        (lambda: relabel(np.zeros((3, 2)), np.zeros((3, 4))), "2 and 4"),
    ],
)
def test_bad_input(call, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=says):
        call()
