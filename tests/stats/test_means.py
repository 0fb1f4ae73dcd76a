"""One contrast per prompt: tests, intervals, ratios, clusters and counts of heads."""

import numpy as np
import pytest
from scipy import stats

from attnscope.errors import InputError
from attnscope.stats.clusters import design_of, intraclass
from attnscope.stats.families import at_least, false_discovery, holm, prompts_for, romano_wolf
from attnscope.stats.means import effect_of, one_sample, paired, unpaired
from attnscope.stats.proportions import newcombe


def _sample(n: int = 30, m: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    a = rng.gamma(4, size=(n, m))
    return a, 1.1 * a + 0.5 * rng.normal(size=(n, m))


def test_p_is_never_below_that_of_students_t():
    x = np.random.default_rng(1).exponential(size=(20, 50)) - 1
    assert (one_sample(x).two_sided() >= stats.ttest_1samp(x, 0).pvalue - 1e-12).all()


def test_symmetric_values_have_students_interval():
    half = np.random.default_rng(2).normal(size=(10, 3))
    x = np.concatenate([half, -half]) + 0.7
    low, high = one_sample(x).interval()
    expected = stats.t.interval(0.95, 19, x.mean(0), stats.sem(x))
    assert np.allclose((low, high), expected)


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_the_ends_of_an_interval_have_the_p_of_its_level(level):
    a, b = _sample()
    contrast = paired(a, b)
    low, high = contrast.at(1.0).interval(level)
    assert np.allclose(
        [contrast.at(1.0, end).more()[i] for i, end in enumerate(low)], (1 - level) / 2
    )
    assert np.allclose(
        [contrast.at(1.0, end).less()[i] for i, end in enumerate(high)], (1 - level) / 2
    )


def test_the_ratio_interval_holds_every_factor_that_is_not_rejected():
    a, b = _sample()
    contrast = paired(a, b)
    ratio, low, high = contrast.ratio()
    assert np.allclose(ratio, b.mean(0) / a.mean(0))
    for i in range(a.shape[1]):
        assert contrast.at(low[i]).more()[i] == pytest.approx(0.025, abs=1e-6)
        assert contrast.at(high[i]).less()[i] == pytest.approx(0.025, abs=1e-6)


def test_the_ratio_interval_reaches_over_gaps():
    """Between accepted ratios there are rejected ones; the interval covers all of them."""
    a = [1.24, 3.47, 2.16, 3.58, 0.18, 32.78]
    b = [0.11, 0.54, 0.32, 0.43, 0.11, 11.23]
    contrast = paired(a, b, ranges=((0, np.inf), (0, np.inf)))
    _, low, high = contrast.ratio()
    assert contrast.at(0.4).two_sided()[0] < 0.05 < contrast.at(0.95).two_sided()[0]
    assert low[0] <= 0.4 < 0.95 <= high[0]


def test_a_ratio_over_a_mean_near_0_has_no_upper_end():
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.1, 1, size=(12, 1)), rng.normal(2, 0.1, size=(12, 1))
    if a.mean() < 0:
        a = -a
    _, low, high = paired(a, b).ratio()
    assert (low[0], high[0]) == (-np.inf, np.inf)
    a = np.append(np.linspace(0.001, 0.002, 11), 10.0)[:, None]
    _, low, high = paired(a, b, ranges=((0, np.inf), (0, np.inf))).ratio()
    assert 0 < low[0] < b.mean() / a.mean()
    assert np.isinf(high[0])


def test_the_ratio_is_one_of_means_not_of_logarithms():
    a = np.array([[1.0], [100.0]] * 8)
    b = np.array([[2.0], [90.0]] * 8) + np.linspace(0, 0.1, 16)[:, None]
    ratio, *_ = paired(a, b).ratio()
    assert ratio[0] < 1 < np.exp(np.log(b / a).mean())


def test_fewer_than_six_units_decide_nothing():
    tested = one_sample(np.random.default_rng(4).normal(size=(5, 2)) + 9)
    assert np.isnan(tested.two_sided()).all()
    assert np.isnan(tested.interval()[0]).all()


def test_twelve_prompts_cannot_decide_a_family_of_many_thousands():
    tested = one_sample(np.random.default_rng(5).normal(size=(12, 1)) + 9)
    assert tested.two_sided()[0] == 2.0**-11
    assert np.isnan(tested.interval(1 - 1e-4)[0][0])


def test_units_that_share_one_value_do_not_count():
    x = np.zeros((30, 1))
    x[:5, 0] = 1 + np.arange(5)
    assert np.isnan(one_sample(x).two_sided()[0])
    x[5:8, 0] = 2
    assert one_sample(x).two_sided()[0] >= 2.0**-7


def test_equal_values_in_a_known_range_have_the_interval_of_a_count():
    low, high = one_sample(np.zeros((30, 1)), within=(0, 1)).interval()
    assert low[0] == 0
    assert high[0] == pytest.approx(1 - 0.025 ** (1 / 30))
    shifted = one_sample(np.zeros((30, 1)) - high[0], within=(-high[0], 1 - high[0]))
    assert shifted.less()[0] == pytest.approx(0.025)


def test_intervals_stay_in_the_possible_range():
    x = np.random.default_rng(6).beta(0.5, 20, size=(8, 4))
    low, high = one_sample(x, within=(0.0, 1.0)).interval()
    assert (low >= 0).all()
    assert (high <= 1).all()


def test_a_prompt_without_a_value_on_one_side_does_not_count():
    a, b = _sample(12, 1)
    a[3], b[7] = np.nan, np.nan
    kept = [i for i in range(12) if i not in (3, 7)]
    assert paired(a, b).at(1.0).two_sided() == paired(a[kept], b[kept]).at(1.0).two_sided()


def test_unpaired_samples_use_welch():
    rng = np.random.default_rng(7)
    a, b = np.concatenate([x := rng.normal(size=(10, 1)), -x]), 0.4 + np.zeros((0, 1))
    b = 0.4 + 3 * np.concatenate([y := rng.normal(size=(8, 1)), -y])
    expected = stats.ttest_ind(b, a, equal_var=False)
    tested = unpaired(a, b).at(1.0)
    assert tested.degrees[0] == pytest.approx(expected.df[0])
    # The two groups are symmetric, so that the skewness is 0.
    assert tested.two_sided()[0] == pytest.approx(expected.pvalue[0])


def test_clusters_of_equal_size_have_the_error_of_their_means():
    x, label = np.random.default_rng(8).normal(size=(40, 2)), np.repeat(np.arange(8), 5)
    means = x.reshape(8, 5, 2).mean(1)
    design = design_of(x, cluster=label)
    assert np.allclose(np.sqrt((design.parts**2).sum(0)), stats.sem(means))
    assert np.allclose(design.degrees, 7)


def test_unequal_clusters_have_the_variance_and_degrees_of_the_full_matrices():
    sizes = np.array([1, 2, 3, 4, 20])
    label = np.repeat(np.arange(5), sizes)
    x, n = np.random.default_rng(9).normal(size=(30, 1)), 30
    hat = np.eye(n) - 1 / n
    variance, columns = 0.0, []
    for group in range(5):
        some = label == group
        value, vector = np.linalg.eigh(hat[np.ix_(some, some)])
        root = vector @ np.diag(value**-0.5) @ vector.T
        columns.append(hat[:, some] @ root @ np.ones(some.sum()) / n)
        variance += (np.ones(some.sum()) @ root @ (x - x.mean())[some, 0] / n) ** 2
    eigenvalues = np.linalg.eigvalsh(np.array(columns) @ np.array(columns).T)
    design = design_of(x, cluster=label)
    assert (design.parts**2).sum() == pytest.approx(variance)
    assert design.degrees[0] == pytest.approx(eigenvalues.sum() ** 2 / (eigenvalues**2).sum())


def test_strata_take_out_the_variance_between_them():
    level = np.repeat([0, 1], 10)
    x = level[:, None] * 50.0 + np.random.default_rng(10).normal(size=(20, 1))
    error = one_sample(x, strata=level).error[0]
    within = [x[level == k, 0].var(ddof=1) / 10 for k in (0, 1)]
    assert error == pytest.approx(np.sqrt(sum(within)) / 2)


def test_a_stratum_of_one_unit_is_refused():
    with pytest.raises(InputError) as error:
        design_of(np.zeros((3, 1)), strata=[0, 0, 1])
    assert error.value.code == "stratum-too-small"


def test_a_cluster_in_two_strata_is_refused():
    with pytest.raises(InputError) as error:
        design_of(np.zeros((4, 1)), cluster=[0, 0, 1, 1], strata=[0, 1, 1, 1])
    assert error.value.code == "cluster-in-several-strata"


def test_the_intraclass_correlation_needs_five_groups_of_two():
    x = np.random.default_rng(11).normal(size=(20, 1))
    assert np.isnan(intraclass(x, [*range(18), 0, 1])).all()
    assert not np.isnan(intraclass(x, np.arange(20) // 2)).any()


def test_at_least_k_heads_is_the_partial_conjunction():
    p = [0.001, 0.002, 0.2, 0.3]
    assert at_least(p, 0.025) == 2
    assert at_least([0.01] * 4, 0.025) == 0
    assert at_least([0.001] * 4, 0.025) == 4
    assert at_least([np.nan, 0.001], 0.025) == 1


def test_the_number_of_prompts_that_many_heads_need():
    n = prompts_for(270, 0.025)
    assert at_least([2.0**-n] * 270, 0.025) == 270
    assert at_least([2.0 ** (1 - n)] * 270, 0.025) == 0


def test_holm_is_monotone_and_leaves_nan():
    assert np.allclose(holm([0.01, 0.04, 0.03]), [0.03, 0.06, 0.06])
    assert np.isnan(holm([0.01, np.nan])[1])


def test_q_is_within_families():
    q = false_discovery([0.01, 0.04, 0.04, np.nan], [0, 0, 1, 1])
    assert np.allclose(q[:3], [0.02, 0.04, 0.04])
    assert np.isnan(q[3])


def test_the_family_wise_p_is_at_least_p_and_small_for_a_large_effect():
    x = np.random.default_rng(12).normal(size=(30, 40))
    x[:, 0] += 3
    contrast = paired(0 * x, x)
    p = romano_wolf(contrast, np.zeros(40, dtype=int), resamples=500)
    assert (p >= contrast.at(1.0).two_sided()).all()
    assert p[0] < 0.01
    assert p[1:].min() > 0.05


def test_heads_with_one_value_are_corrected_too():
    """A constant difference in a known range has a p without resampling."""
    x = np.random.default_rng(15).normal(0, 0.01, size=(30, 40))
    x[:, 0] = 0.1
    contrast = paired(0 * x, x, ranges=((0, 0), (-1, 1)))
    alone = contrast.at(1.0).two_sided()[0]
    assert alone < 0.2
    assert romano_wolf(contrast, np.zeros(40, dtype=int), resamples=500)[0] >= min(1, 30 * alone)


def test_sizes_of_clusters_do_not_make_equal_values_informative():
    x = np.zeros((12, 1))
    x[:2] = 1.0
    label = np.repeat(np.arange(8), [1, 1, 1, 1, 2, 2, 2, 2])
    tested = paired(0 * x, x, label)
    assert tested.at(1.0).informative == tested.at(1.0, 0.3).informative == [2]


def test_equal_heads_cost_the_family_wise_p_little():
    x = np.random.default_rng(13).normal(size=(30, 1)) + 0.45
    alone = romano_wolf(paired(0 * x, x), [0], resamples=2000)[0]
    many = np.repeat(x, 100, axis=1)
    together = romano_wolf(paired(0 * many, many), np.zeros(100, dtype=int), resamples=2000)
    assert together.max() == pytest.approx(alone, abs=0.01)


def test_newcombes_interval_is_the_published_one():
    # Newcombe (1998), table II: 36, 12, 2, 0 of 50 gives 0.2000 [0.0569, 0.3404] by method 10.
    a = np.repeat([1, 1, 0, 0], [36, 12, 2, 0]).astype(float)[:, None]
    b = np.repeat([1, 0, 1, 0], [36, 12, 2, 0]).astype(float)[:, None]
    result = newcombe(b, a)
    assert result["difference"][0] == pytest.approx(0.2)
    assert (result["low"][0], result["high"][0]) == pytest.approx((0.0569, 0.3404), abs=2e-4)


def test_newcombes_p_is_the_level_at_which_the_interval_ends_at_0():
    rng = np.random.default_rng(14)
    a, b = ((rng.random((40, 6)) < share).astype(float) for share in (0.5, 0.7))
    result = newcombe(a, b)
    for i, p in enumerate(result["p"]):
        ends = newcombe(a[:, [i]], b[:, [i]], level=1 - p)
        assert min(abs(ends["low"][0]), abs(ends["high"][0])) == pytest.approx(0, abs=1e-9)


def test_the_effect_is_in_standard_deviations_of_the_differences():
    a, b = _sample(20, 2)
    d = b - a
    expected = d.mean(0) / d.std(0, ddof=1) * (1 - 3 / (4 * 19 - 1))
    assert np.allclose(effect_of(paired(a, b)), expected)
