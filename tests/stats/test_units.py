"""Clusters and strata: against the textbook's formulas by hand."""

import numpy as np
import polars as pl
import pytest

from attnscope.errors import InputError
from attnscope.stats.intervals import moments
from attnscope.stats.resampling import ResamplingUnits
from attnscope.stats.units import design_effect, explained, intraclass, units
from support_errors import raises


def sample(n: int = 24, m: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, m))


def test_prompts_are_units_by_default() -> None:
    x = sample()
    made = units(x)
    np.testing.assert_array_equal(made.x, x)
    np.testing.assert_array_equal(made.parts, x)
    assert made.degrees.tolist() == [23] * 3


def test_equal_clusters_are_their_means() -> None:
    x, cluster = sample(), np.repeat(np.arange(6), 4)
    made = units(x, cluster)
    means = x.reshape(6, 4, 3).mean(1)
    np.testing.assert_allclose(made.x, means, atol=1e-12)
    np.testing.assert_allclose(made.parts, means, atol=1e-12)


def test_unequal_clusters_have_the_ratio_estimators_error() -> None:
    x, cluster = sample(m=1), np.repeat(np.arange(7), [1, 2, 3, 4, 4, 5, 5])
    made = units(x, cluster)
    assert made.x.mean() == pytest.approx(x.mean())
    assert made.parts.mean() == pytest.approx(x.mean())
    totals = np.array([(x[cluster == g] - x.mean()).sum() for g in range(7)])
    by_hand = np.sqrt(7 / 6 * (totals**2).sum()) / 24
    assert moments(made.x).error[0] == pytest.approx(by_hand)


def test_a_prompt_without_a_value_is_left_out() -> None:
    x, cluster = sample(), np.repeat(np.arange(6), 4)
    x[[0, 5], 1] = np.nan
    x[8:12, 2] = np.nan  # a whole cluster
    made = units(x, cluster)
    there = ~np.isnan(x)
    assert made.n.tolist() == [6, 6, 5]
    for column in range(3):
        rows = there[:, column]
        alone = units(x[rows, column], cluster[rows])
        np.testing.assert_allclose(
            made.x[~np.isnan(made.x[:, column]), column], alone.x[:, 0], atol=1e-12
        )


def test_strata_take_out_what_lies_between_them() -> None:
    strata = np.repeat([0, 1, 2], [6, 8, 10])
    x = sample(m=1) + 10 * strata[:, None]
    made = units(x, strata=strata)
    parts = [x[strata == s, 0] for s in range(3)]
    by_hand = np.sqrt(sum((len(p) / 24) ** 2 * p.var(ddof=1) / len(p) for p in parts))
    assert made.x.mean() == pytest.approx(x.mean())
    assert moments(made.x, made.degrees).error[0] == pytest.approx(by_hand)
    assert made.degrees.tolist() == [21]


def test_clusters_lie_in_one_stratum() -> None:
    x, cluster = sample(), np.repeat(np.arange(12), 2)
    made = units(x, cluster, strata=np.repeat([0, 1], 12))
    assert made.degrees.tolist() == [10] * 3
    with raises(InputError, "cluster-in-several-strata"):
        units(x, cluster, strata=np.tile([0, 1], 12))
    with raises(InputError, "stratum-too-small"):
        units(x, strata=np.append(np.zeros(23), 1))


def test_intraclass_correlation() -> None:
    # Analysis of variance by hand, of equal clusters.
    x, cluster = sample(), np.repeat(np.arange(6), 4)
    x += np.random.default_rng(1).normal(size=(6, 1))[cluster]
    groups = x.reshape(6, 4, 3)
    between = 4 * groups.mean(1).var(0, ddof=1)
    within = groups.var(1, ddof=1).mean(0)
    by_hand = (between - within) / (between + 3 * within)
    np.testing.assert_allclose(intraclass(x, cluster), by_hand, atol=1e-12)
    assert np.isnan(intraclass(x, np.arange(24))).all()
    assert np.isnan(intraclass(np.ones((24, 1)), cluster)).all()


def test_the_design_effect_is_what_the_correlation_says() -> None:
    rng = np.random.default_rng(0)
    cluster = np.repeat(np.arange(200), 5)
    x = np.sqrt(0.3) * rng.normal(size=(200, 40))[cluster] + np.sqrt(0.7) * rng.normal(
        size=(1000, 40)
    )
    effect = design_effect(x, units(x, cluster))
    assert effect.mean() == pytest.approx(1 + 4 * 0.3, abs=0.1)
    assert explained(x, cluster) == pytest.approx(0.3, abs=0.03)
    assert np.isnan(explained(x, np.zeros(1000)))


METADATA = pl.DataFrame(
    {
        "prompt": range(24),
        "level": [i % 4 for i in range(24)],
        "document": [f"d{i // 4}" for i in range(24)],
        "author": [f"a{i // 8}" for i in range(24)],
    }
)


def test_facts_are_labels() -> None:
    assert ResamplingUnits().labels(range(3)) == {"cluster": None, "strata": None}
    labels = ResamplingUnits(METADATA, "document", None).labels([0, 5, 23])
    assert labels["cluster"] is not None
    assert labels["cluster"].tolist() == ["d0", "d1", "d5"]
    nested = ResamplingUnits(METADATA, ["author", "document"]).labels([0, 5, 23])["cluster"]
    assert nested is not None
    assert nested.tolist() == ["a0", "a0", "a2"]
    with raises(InputError, "clusters-not-nested", inner="level", outer="document"):
        ResamplingUnits(METADATA, ["document", "level"]).labels(range(24))
    with raises(InputError, "unknown-metadata-column", known=["level", "document", "author"]):
        ResamplingUnits(METADATA, "topic")
    with raises(InputError, "unknown-metadata-column", value="topic"):
        ResamplingUnits(None, "topic")
    with raises(InputError, "missing-metadata", name="level", prompts=[24]):
        ResamplingUnits(METADATA, "level").labels(range(25))


def test_a_metadata_column_that_explains_much_gives_a_warning() -> None:
    x = sample() + 5 * np.arange(24)[:, None] // 4
    sentences = ResamplingUnits(METADATA).warnings(x, range(24))
    assert any("document" in one for one in sentences)
    assert not any("level" in one for one in sentences)
    assert not any(
        "document" in one for one in ResamplingUnits(METADATA, "document").warnings(x, range(24))
    )


def test_repeats_of_a_prompt_are_one_unit() -> None:
    again = METADATA.with_columns(pl.Series("repeat_of", [i % 8 for i in range(24)]))
    made = ResamplingUnits(again)
    labels = made.labels([0, 8, 9])["cluster"]
    assert labels is not None
    assert labels.tolist() == ["0", "0", "1"]
    assert made.count(range(24)) == 8
    assert made.describe(range(24)) == "in 8 clusters (repeat_of)"
    # Within a cluster they are in its spread; a prompt in two of them is a mistake.
    assert (
        ResamplingUnits(again.with_columns(topic=pl.col("repeat_of") % 2), "topic").count(range(24))
        == 2
    )
    with raises(InputError, "clusters-not-nested", inner="repeat_of"):
        ResamplingUnits(again, "document").labels(range(24))
    # An author may say it of some prompts only: the others are their own.
    some = METADATA.with_columns(pl.Series("repeat_of", [None, None, 0, *[None] * 21]))
    assert ResamplingUnits(some).count(range(24)) == 23
