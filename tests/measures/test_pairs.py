"""Pair measures against their definitions, for whatever numbers."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attnscope.measures.layer import align_to_variant
from attnscope.measures.slope import slope as slope_of
from attnscope.measures.spikes import SHARES, spikes
from attnscope.measures.uniformity import uniformity
from dense_rows import doubt

WEIGHTS = st.one_of(st.just(np.nan), st.floats(2.0**-10, 1.0, width=32))


@st.composite
def two_profiles(draw):
    """Base and variant averages [B, H, K] with gaps, and which keys count."""
    shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 25)))
    base = draw(arrays(np.float64, shape, elements=WEIGHTS))
    variant = draw(arrays(np.float64, shape, elements=WEIGHTS))
    keys = draw(arrays(np.bool_, (shape[0], 1, shape[2])))
    return base, variant, keys


def used(base, variant, keys, b, h):
    keep = np.isfinite(base[b, h]) & np.isfinite(variant[b, h]) & keys[b, 0]
    return base[b, h][keep], variant[b, h][keep]


@settings(max_examples=60, deadline=None)
@given(two_profiles())
def test_slope_is_least_squares_through_the_origin(profiles):
    slope, ratio, _, size = slope_of(*profiles)
    for b, h in np.ndindex(slope.shape):
        x, y = used(*profiles, b, h)
        assert size[b, h] == len(x)
        if not len(x):
            assert np.isnan(slope[b, h])
            assert np.isnan(ratio[b, h])
            continue
        fitted = np.linalg.lstsq(x[:, None], y, rcond=None)[0][0]
        np.testing.assert_allclose(slope[b, h], fitted, rtol=1e-9)
        np.testing.assert_allclose(ratio[b, h], y.mean() / x.mean(), rtol=1e-9)


@settings(max_examples=60, deadline=None)
@given(two_profiles(), st.sampled_from(SHARES))
def test_spikes_are_the_largest_of_both_sides_together(profiles, share):
    at, rest, fall, of_spikes, of_rest = spikes(*profiles, share)
    for b, h in np.ndindex(at.shape):
        x, y = used(*profiles, b, h)
        order = sorted(range(len(x)), key=lambda n: (-x[n] * y[n], n))
        n = -(-round(100 * share) * len(x) // 100)
        top, others = order[:n], order[n:]
        assert (of_spikes[b, h], of_rest[b, h]) == (len(top), len(others))
        for found, part in ((at, top), (rest, others)):
            little = min(side[part].sum() / side.sum() for side in (x, y)) if part else 0.0
            if part and (part is top or little >= 1e-3):
                np.testing.assert_allclose(found[b, h], y[part].mean() / x[part].mean(), rtol=1e-9)
            else:
                assert np.isnan(found[b, h])
        whole = (x - y).sum()
        if whole > 0.0100001 * x.sum():
            np.testing.assert_allclose(fall[b, h], (x - y)[top].sum() / whole, rtol=1e-6, atol=1e-9)
        elif whole < 0.0099999 * x.sum():
            assert np.isnan(fall[b, h])


def profile(spike: float, rest: float) -> np.ndarray:
    """Ten tokens of one head, of which the first is the spike."""
    return np.array([spike, *[rest / 9] * 9])[None, None]


def test_a_ratio_of_next_to_nothing_is_not_defined():
    """Rounding alone would decide it: the rest of either side holds less than 1e-3 of the sum."""
    keys = np.ones((1, 1, 10), dtype=bool)
    for base, variant, defined in (
        (profile(0.5, 0.0006), profile(0.5, 0.0006), True),
        (profile(0.5, 0.0004), profile(0.5, 0.1), False),
        (profile(0.5, 0.1), profile(0.5, 0.0004), False),
        (profile(0.5, 0.0), profile(0.5, 0.1), False),
    ):
        at, rest, *_ = spikes(base, variant, keys, 0.1)
        assert np.isfinite(at).all()
        assert np.isfinite(rest).all() == defined


def test_a_part_of_next_to_no_fall_is_not_defined():
    """The whole fall is less than a hundredth of the base's sum."""
    keys = np.ones((1, 1, 10), dtype=bool)
    for variant, defined in (
        (profile(0.488, 0.5), True),
        (profile(0.492, 0.5), False),
        (profile(0.45, 0.545), False),
        (profile(0.5, 0.5), False),
        (profile(0.6, 0.5), False),
    ):
        _, _, fall, *_ = spikes(profile(0.5, 0.5), variant, keys, 0.1)
        assert np.isfinite(fall).all() == defined


def test_noise_alone_makes_no_spikes_fall():
    """One factor for all tokens and equal noise on both sides: spikes chosen by the base would
    fall by about a hundredth more than the rest."""
    draw = np.random.default_rng(0)
    truth = draw.lognormal(size=(1, 4000, 60)) / 60
    base, variant = (
        side * np.exp(0.1 * draw.normal(size=truth.shape)) for side in (truth, 0.6 * truth)
    )
    keys = np.ones((1, 1, 60), dtype=bool)
    at, rest, *_ = spikes(base, variant, keys, 0.1)
    error = (at - rest).std() / np.sqrt(at.size)
    assert abs((at - rest).mean()) < 4 * error
    rank = np.argsort(np.argsort(-base, axis=-1), axis=-1)
    by_base = [
        np.where(part, variant, 0).sum(-1) / np.where(part, base, 0).sum(-1)
        for part in (rank < 6, rank >= 6)
    ]
    assert (by_base[0] - by_base[1]).mean() < -0.005


@settings(max_examples=60, deadline=None)
@given(two_profiles())
def test_uniformity_is_the_coefficient_of_variation(profiles):
    average, _, filler = profiles
    value, size = uniformity(average, filler)
    for b, h in np.ndindex(value.shape):
        inside = average[b, h][np.isfinite(average[b, h]) & filler[b, 0]]
        assert size[b, h] == len(inside)
        if len(inside):
            expected = inside.std() / inside.mean()
            np.testing.assert_allclose(value[b, h], expected, rtol=1e-9, atol=1e-12)
        else:
            assert np.isnan(value[b, h])


@settings(max_examples=60, deadline=None)
@given(two_profiles(), st.floats(0.1, 3.0))
def test_one_factor_for_all_is_found_exactly(profiles, factor):
    base, _, keys = profiles
    slope, ratio, fit, size = slope_of(base, factor * base, keys)
    at, *_ = spikes(base, factor * base, keys, 0.1)
    there = size > 0
    for found in (slope, ratio, at):
        np.testing.assert_allclose(found[there], factor, rtol=1e-9)
    np.testing.assert_allclose(fit[np.isfinite(fit)], 1.0, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(two_profiles())
def test_the_fit_is_r_squared_of_the_line_through_the_origin(profiles):
    base, variant, keys = profiles
    slope, _, fit, _ = slope_of(base, variant, keys)
    for b, h in np.ndindex(fit.shape):
        used = np.isfinite(base[b, h]) & np.isfinite(variant[b, h]) & keys[b, 0]
        x, y = base[b, h][used], variant[b, h][used]
        varies = ((y - y.mean()) ** 2).sum() if len(y) else 0.0
        if varies > 1e-12:
            by_hand = 1 - ((y - slope[b, h] * x) ** 2).sum() / varies
            np.testing.assert_allclose(fit[b, h], by_hand, rtol=1e-6, atol=1e-9)


def test_no_fit_where_nothing_varies():
    flat = np.full((1, 1, 6), 0.5859375)
    _, _, fit, _ = slope_of(flat, 1.4974506710529791 * flat, np.ones((1, 1, 6), dtype=bool))
    assert np.isnan(fit).all()


def test_scatter_lowers_the_fit_and_not_slope_and_ratio():
    draw = np.random.default_rng(0)
    base = draw.lognormal(size=(1, 1, 4000))
    variant = 0.6 * base * np.exp(draw.normal(size=base.shape) - 0.5)
    keys = np.ones((1, 1, 4000), dtype=bool)
    slope, ratio, fit, _ = slope_of(base, variant, keys)
    assert abs(slope - ratio).item() < 0.1
    assert fit.item() < 0.9


def test_averages_of_the_base_are_aligned_to_the_variant():
    base = np.array([[[0.1, 0.2, 0.3]]])
    moved = align_to_variant(base, np.array([[0, -1, -1, 1, 2]]))
    np.testing.assert_array_equal(moved, [[[0.1, np.nan, np.nan, 0.2, 0.3]]])


@settings(max_examples=100, deadline=None)
@given(
    arrays(np.float64, (2, 20), elements=st.floats(2.0**-10, 1.0)),
    arrays(np.int8, (2, 20), elements=st.sampled_from([-1, 1])),
    st.integers(1, 19),
)
def test_a_share_of_the_fall_is_as_certain_as_the_averages_allow(sides, signs, spikes_among):
    """The tolerance of `spike_fall` against dense attention: what follows from the averages'."""
    part = np.arange(20) < spikes_among
    off = 1e-3

    def share(x, y):
        return (x - y)[part].sum() / (x - y).sum()

    # Every average moved up or down by all that is allowed; and the worst that can be done to T.
    for moved in (sides * (1 + off * signs), sides * (1 + off * np.array([[-1.0], [1.0]]))):
        may = doubt(*sides, part, off)
        if np.isfinite(may):
            assert abs(share(*moved) - share(*sides)) <= may * (1 + 1e-9)
        else:
            assert abs((sides[0] - sides[1]).sum()) <= off * sides.sum()
