"""Intervals and their moments against scipy, called once per column, and against definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from attnscope.errors import InputError
from attnscope.stats import arrays
from attnscope.stats import intervals as room
from attnscope.stats.bootstrap import bca, expanded
from attnscope.stats.intervals import (
    intervals,
    intervals_unpaired,
    moments,
    moments_unpaired,
    one_sided,
    skewed_interval,
    t_interval,
    two_sided,
)
from support_errors import raises


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


def test_quantiles_are_taken_farther_out_for_few_units() -> None:
    # z at the expanded level, times what the bootstrap falls short by, is t.
    for n in (5, 10, 20, 100):
        z = stats.norm.isf((1 - expanded(0.95, n)) / 2)
        assert z * np.sqrt((n - 1) / n) == pytest.approx(stats.t.isf(0.025, n - 1), abs=1e-9)
    assert expanded(0.95, 10**6) == pytest.approx(0.95, abs=1e-6)


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


def test_students_is_scipys() -> None:
    x = skewed(15, 4)
    low, high = t_interval(moments(x), 0.9)
    theirs = stats.ttest_1samp(x, 0).confidence_interval(0.9)
    np.testing.assert_allclose([low, high], [theirs.low, theirs.high], atol=1e-12)
    a, b = skewed(15, 4), skewed(9, 4, seed=1)
    test = stats.ttest_ind(b, a, equal_var=False)
    theirs = test.confidence_interval(0.95)
    np.testing.assert_allclose(
        t_interval(moments_unpaired(a, b)), [theirs.low, theirs.high], atol=1e-12
    )


def test_skewness_of_an_estimate() -> None:
    x = skewed(20, 3)
    np.testing.assert_allclose(moments(x).skew, stats.skew(x) / np.sqrt(20), atol=1e-12)
    a, b = skewed(12, 3, seed=1), x
    # Third cumulants of means of independent samples add up, the first's with its sign changed.
    thirds = stats.moment(b, 3) / 20**2 - stats.moment(a, 3) / 12**2
    seconds = stats.moment(b, 2) / 20 + stats.moment(a, 2) / 12
    np.testing.assert_allclose(moments_unpaired(a, b).skew, thirds / seconds**1.5, atol=1e-12)


@given(st.floats(-8, 8), st.floats(-3, 3))
@settings(deadline=None)
def test_the_correction_can_be_undone(t: float, skew: float) -> None:
    there = room._forth(np.array([t]), np.array([skew]))
    back = room._back(there, np.array([skew]))
    # At -3 / skew the cubic is flat, and rounding counts more.
    flat = abs(1 + skew * t / 3) < 0.05
    assert back[0] == pytest.approx(t, abs=0.05 if flat else 1e-5)


def test_without_skewness_the_correction_is_students() -> None:
    x = np.array([-3, -1, -0.5, 0.5, 1, 3.0]) + 0.4
    np.testing.assert_allclose(skewed_interval(moments(x)), t_interval(moments(x)), atol=1e-9)
    assert two_sided(moments(x))[0] == pytest.approx(stats.ttest_1samp(x, 0).pvalue, abs=1e-9)


def test_p_and_interval_agree() -> None:
    x = skewed(14, 200)
    low, high = skewed_interval(moments(x))
    for null in (1.2, 1.65, 2.5):
        called, outside = two_sided(moments(x), null) < 0.05, (null < low) | (null > high)
        assert (called == outside).mean() > 0.85  # the test is the more careful


def test_one_sided_is_the_larger_of_two() -> None:
    for x, null, direction, theirs in (
        (skewed(14, 50), 1.5, "less", "less"),
        (-skewed(14, 50), -1.5, "more", "greater"),
    ):
        p = one_sided(moments(x), null, direction)
        plain = stats.ttest_1samp(x, null, alternative=theirs).pvalue
        assert (p >= plain - 1e-12).all()
        assert (p > plain + 1e-3).any()  # and where skewness says so, larger


def test_the_interval_is_the_hull() -> None:
    x = skewed(14, 20)
    made = intervals(x, resamples=500)
    plain, corrected = t_interval(moments(x)), skewed_interval(moments(x))
    np.testing.assert_allclose(made.low, np.minimum(plain[0], corrected[0]), atol=1e-12)
    np.testing.assert_allclose(made.high, np.maximum(plain[1], corrected[1]), atol=1e-12)
    two = intervals_unpaired(x, skewed(11, 20, seed=3), resamples=500)
    found = moments_unpaired(x, skewed(11, 20, seed=3))
    np.testing.assert_allclose(
        two.low, np.minimum(t_interval(found)[0], skewed_interval(found)[0]), atol=1e-12
    )


def test_informative_units() -> None:
    """All; but where more than half have one value, those that differ from it."""
    x = np.column_stack(
        [np.arange(8.0), [0, 0, 0, 0, 1, 2, 3, 4], [7, 0, 7, 0, 7, 7, 7, 1], np.full(8, 0.1)]
    )
    assert arrays.informative_units(x).tolist() == [8, 8, 3, 0]
    x[[0, 2], 2] = np.nan  # three of six are one value: no more than half
    assert arrays.informative_units(x)[2] == 6


def test_skewness_is_taken_larger_than_it_looks() -> None:
    x = skewed(12, 3)
    found = moments(x)
    usual = stats.skew(x, bias=False) / stats.skew(x)
    np.testing.assert_allclose(found.usual / found.skew, usual)
    np.testing.assert_allclose(found.careful / found.usual, 17 / 12)
    many = moments(skewed(1000, 3))
    np.testing.assert_allclose(many.careful, many.skew, rtol=0.01)


def test_unreliable_if_a_few_units_dominate() -> None:
    rng = np.random.default_rng(0)
    normal, one = rng.normal(size=(24, 200)), rng.normal(0, 0.01, (24, 200))
    one[0] += 5
    assert intervals(normal, resamples=500).unreliable.mean() < 0.02
    assert intervals(one, resamples=500).unreliable.all()
    alike = np.where(np.arange(24)[:, None] < 19, 0.0, normal)
    assert intervals(alike, resamples=500).unreliable.all()
    assert not intervals(alike, informative=np.full(200, 24), resamples=500).unreliable.all()


def test_below_six_units_there_is_no_interval() -> None:
    x = skewed(5, 2)
    assert np.isnan([intervals(x).low, intervals(x).high]).all()
    six = np.column_stack([skewed(6, 1)[:, 0], np.append(skewed(5, 1)[:, 0], np.nan)])
    assert np.isfinite(intervals(six).low).tolist() == [True, False]
    assert np.isnan(intervals_unpaired(skewed(9, 1), skewed(5, 1)).low).all()


def test_constant_columns_have_no_interval() -> None:
    x = np.column_stack([np.full(9, 0.1), np.zeros(9)])
    made = intervals(x)
    assert np.isnan([made.low, made.high]).all()
    assert np.isnan(bca(x)).all()
    assert not made.unreliable.any()
    assert np.isnan(intervals_unpaired(x, x + 1).low).all()
    assert np.isnan(two_sided(moments(x))).all()


def test_a_unit_without_a_value_is_left_out_of_its_column_alone() -> None:
    x = skewed(30, 4) - 1.2
    x[[3, 9], 1] = np.nan
    x[[3, 5, 11], 2] = np.nan
    made, plain = intervals(x, resamples=500), bca(x, resamples=500)
    for column in range(4):
        there = x[:, column][~np.isnan(x[:, column])]
        alone = intervals(there, resamples=500)
        assert made.low[column] == pytest.approx(alone.low[0], abs=1e-12)
        assert made.high[column] == pytest.approx(alone.high[0], abs=1e-12)
        assert plain[0][column] == pytest.approx(bca(there, resamples=500)[0][0], abs=1e-12)
    a, b = x[:15], x[15:]
    unpaired = intervals_unpaired(a, b, resamples=500)
    for column in range(4):
        one, two = (s[:, column][~np.isnan(s[:, column])] for s in (a, b))
        alone = intervals_unpaired(one, two, resamples=500)
        assert unpaired.low[column] == pytest.approx(alone.low[0], abs=1e-12)


def test_a_column_without_values() -> None:
    x = np.full((8, 2), np.nan)
    x[:, 0] = np.arange(8)
    made = intervals(x)
    assert np.isfinite(made.low).tolist() == [True, False]
    assert intervals(np.empty((7, 0))).low.shape == (0,)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x = skewed(25, 9) - 1.2
    whole = bca(x, resamples=300)
    monkeypatch.setattr(arrays, "HELD", 1000)
    np.testing.assert_allclose(bca(x, resamples=300), whole, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: bca(np.zeros((2, 2, 2))), "bad-shape"),
        (lambda: intervals([1.0, np.inf]), "infinite-value"),
        (lambda: intervals([1.0, 2.0], level=95), "out-of-range"),
        (lambda: intervals([1.0, 2.0], resamples=10), "out-of-range"),
        (lambda: intervals_unpaired(np.zeros((3, 2)), np.zeros((3, 4))), "bad-shape"),
    ],
)
def test_bad_input(call, code: str) -> None:  # type: ignore[no-untyped-def]
    with raises(InputError, code):
        call()
