"""Comparisons against independent computations, one head at a time."""

import numpy as np
import polars as pl
import pytest
from scipy import special, stats

from attnscope.errors import InputError
from attnscope.stats.intervals import intervals, intervals_unpaired, moments, two_sided
from attnscope.stats.paired import compare
from attnscope.stats.permute import relabel
from made_values import masses, measured
from support_errors import raises


def columns(table: pl.DataFrame, over: str, pair: tuple[str, str], **where: object) -> list:
    return [
        table.filter(**{over: name}, **where).sort("prompt")["value"].to_numpy() for name in pair
    ]


@pytest.mark.parametrize("over", ["model", "condition"])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_head_is_what_numpy_and_scipy_say(over: str, seed: int) -> None:
    table = masses(conditions=("none", "filler"), seed=seed, prompts=range(11))
    pair = ("base", "tuned") if over == "model" else ("none", "filler")
    held = "condition" if over == "model" else "model"
    made = compare(table, over=over, pair=pair, resamples=999, seed=3)
    assert made.height == 2 * 2 * 3 * 2
    keys = [held, "layer", "head", "item"]
    expected_p = {}
    for row in made.iter_rows(named=True):
        a, b = columns(table, over, pair, **{key: row[key] for key in keys})
        d = b - a
        interval = intervals(d, resamples=999, seed=3)  # itself checked against scipy
        p = stats.permutation_test(
            (d,), np.mean, permutation_type="samples", n_resamples=np.inf
        ).pvalue
        p = max(p, two_sided(moments(d))[0])
        hedges = np.exp(special.gammaln(5) - special.gammaln(4.5)) / np.sqrt(5)
        by_hand = {
            "n": 11,
            "mean_a": a.mean(),
            "mean_b": b.mean(),
            "difference": d.mean(),
            "ratio": b.mean() / a.mean(),
            "effect": hedges * d.mean() / d.std(ddof=1),
            "low": interval.low[0],
            "high": interval.high[0],
        }
        for name, value in by_hand.items():
            assert row[name] == pytest.approx(value, abs=1e-9), name
        assert row["paired"]
        assert row["note"].startswith("unreliable interval" if interval.unreliable[0] else "")
        assert bool(row["note"]) == row["unreliable"] == interval.unreliable[0]
        assert abs(row["p"] - p) < 4.5 * np.sqrt(p * (1 - p) / 999) + 2e-3
        expected_p.setdefault((row[held], row["item"]), []).append((row["p"], row["q"]))
    for family in expected_p.values():  # layers × heads of one item, and no others
        p, q = np.array(family).T
        assert len(p) == 6
        np.testing.assert_allclose(q, stats.false_discovery_control(p), atol=1e-9)


def test_p_is_exact_where_all_signs_can_be_tried() -> None:
    table = masses(prompts=range(11))
    made = compare(table)
    for row in made.iter_rows(named=True):
        where = {key: row[key] for key in ("layer", "head", "item")}
        a, b = columns(table, "model", ("base", "tuned"), **where)
        theirs = stats.permutation_test(
            (b - a,), np.mean, permutation_type="samples", n_resamples=np.inf
        ).pvalue
        assert row["p"] == pytest.approx(max(theirs, two_sided(moments(b - a))[0]), abs=1e-9)


def test_combined_heads_are_one_row_a_layer() -> None:
    table = masses()
    made = compare(table, combine="mean", normalise="lift")
    assert made.height == 2 * 2
    assert made["head"].null_count() == 4
    assert made["combine"].unique().to_list() == ["mean"]
    assert made["normalise"].unique().to_list() == ["lift"]
    row = made.filter(layer=1, item="hash").row(0, named=True)
    lift = table.filter(layer=1, item="hash").with_columns(v=pl.col("value") / pl.col("uniform"))
    means = lift.group_by("model").agg(pl.col("v").mean())
    assert row["mean_b"] == pytest.approx(means.filter(model="tuned")["v"][0], abs=1e-9)


def test_one_strong_head_can_pass_the_correction() -> None:
    def value(m: str, p: int, c: str, layer: int, head: int, i: str) -> float:
        rng = np.random.default_rng([p, layer, head, m == "tuned"])
        return float(rng.normal() + 20 * (m == "tuned" and layer == head == 0))

    made = compare(masses(value, layers=30, heads=20, prompts=range(20), items=["hash"]))
    assert made.filter(pl.col("q") < 0.05).select("layer", "head").rows() == [(0, 0)]


def test_unpaired_prompts_are_listed() -> None:
    table = masses().filter((pl.col("model") == "tuned") | ~pl.col("prompt").is_in([2, 3, 4, 9]))
    with raises(InputError, "unpaired-prompts", unpaired={("tuned", "none"): [2, 3, 4, 9]}):
        compare(table)
    assert not compare(table, paired=False)["paired"].any()


def test_a_condition_that_one_model_lacks_is_unpaired() -> None:
    table = masses(conditions=("none", "filler"))
    table = table.filter((pl.col("model") == "base") | (pl.col("condition") == "none"))
    with raises(InputError, "unpaired-prompts", unpaired={("base", "filler"): list(range(12))}):
        compare(table)


def test_different_prompts_are_compared_as_groups_and_it_says_so() -> None:
    table = masses(prompts=range(20)).filter((pl.col("model") == "base") == (pl.col("prompt") < 9))
    made = compare(table, resamples=999, seed=3)
    for row in made.iter_rows(named=True):
        where = {key: row[key] for key in ("layer", "head", "item")}
        a, b = columns(table, "model", ("base", "tuned"), **where)
        interval = intervals_unpaired(a, b, resamples=999, seed=3)  # itself checked
        pooled = np.sqrt((8 * a.var(ddof=1) + 10 * b.var(ddof=1)) / 18)
        hedges = np.exp(special.gammaln(9) - special.gammaln(8.5)) / np.sqrt(9)
        assert (row["n"], row["n_a"], row["n_b"]) == (20, 9, 11)
        assert row["difference"] == pytest.approx(b.mean() - a.mean(), abs=1e-9)
        assert row["effect"] == pytest.approx(hedges * (b.mean() - a.mean()) / pooled, abs=1e-9)
        assert row["low"] == pytest.approx(interval.low[0], abs=1e-9)
        assert row["high"] == pytest.approx(interval.high[0], abs=1e-9)
        assert row["p"] >= relabel(a, b, resamples=999, seed=3)[0][0] - 1e-9
        assert not row["paired"]
        assert row["note"].startswith("unpaired: models base and tuned")


def test_fewer_than_six_prompts_have_no_interval_and_no_p_value() -> None:
    made = compare(masses(prompts=range(5)))
    for name in ("p", "q", "p_fwer", "low", "high", "effect_low", "ratio_high", "detectable"):
        assert made[name].null_count() == made.height, name
    assert made["difference"].null_count() == 0
    assert "5 units" in made["note"][0]
    assert compare(masses(prompts=range(6)))["p"].null_count() == 0


def test_constant_differences_have_no_interval() -> None:
    made = compare(masses(lambda m, *at: 0.1 if m == "base" else 0.3))
    row = made.row(0, named=True)
    assert row["difference"] == pytest.approx(0.2)
    assert (row["low"], row["high"], row["effect"]) == (None, None, None)
    assert row["p"] == 1  # nothing says how far the next prompt would be
    assert row["outcome"] == "undetermined"
    assert "p is 1" in row["note"]
    same = compare(masses(lambda m, p, *at: 0.1 * p)).row(0, named=True)
    assert (same["difference"], same["low"], same["high"], same["p"]) == (0, None, None, 1)


def test_rounding_is_not_an_effect() -> None:
    made = compare(masses(lambda m, p, *at: 0.3 if m == "base" else 0.1 + 0.2))
    assert made["p"].unique().to_list() == [1.0]


def test_undefined_values_leave_their_prompt_out_and_are_counted() -> None:
    table = masses(
        lambda m, p, c, lay, h, i: None if (m, p, i) == ("tuned", 3, "star") else 0.1 * p + lay
    )
    made = compare(table).filter(item="star")
    assert made["n"].unique().to_list() == [11]
    assert "1 prompts without a value left out" in made["note"][0]
    assert made["difference"].unique().to_list() == [0.0]
    others = 0.1 * np.delete(np.arange(12), 3).mean()  # the first leaves the same prompt out
    for name in ("mean_a", "mean_b"):
        assert made.filter(layer=0)[name].to_numpy() == pytest.approx([others] * 3, abs=1e-12)
    nan = table.with_columns(pl.col("value").fill_null(float("nan")))
    assert compare(nan).equals(compare(table))


def test_nothing_but_undefined_values() -> None:
    row = compare(masses(lambda *at: None)).row(0, named=True)
    assert row["n"] == 0
    assert {row[name] for name in ("difference", "ratio", "effect", "low", "high", "p")} == {None}


def test_measures_of_the_variant_alone_are_left_out() -> None:
    both = pl.concat([masses(models=["base"], conditions=("none", "filler")), _lambdas()])
    made = compare(both, over="condition", pair=("none", "filler"))
    assert made["measure"].unique().to_list() == ["mass"]


def _lambdas() -> pl.DataFrame:
    return measured("lambda", lambda *at: 0.5)


def test_which_pair() -> None:
    table = masses(models=("a", "b", "c"))
    with raises(InputError, "ambiguous-pair", known=["a", "b", "c"]):
        compare(table)
    with raises(InputError, "unknown-model", value="d"):
        compare(table, pair=("a", "d"))
    with raises(InputError, "bad-pair", value=("a", "a")):
        compare(table, pair=("a", "a"))
    made = compare(table, pair=("c", "a"))
    back = compare(table, pair=("a", "c"))
    np.testing.assert_allclose(made["difference"], -back["difference"].to_numpy(), atol=1e-12)
    np.testing.assert_allclose(made["p"], back["p"], atol=1e-12)


def test_all_pairs_are_corrected_together() -> None:
    table = masses(models=("a", "b", "c"), items=["hash"])
    made = compare(table, pair="all")
    assert made.select("a", "b").unique(maintain_order=True).rows() == [
        ("a", "b"),
        ("a", "c"),
        ("b", "c"),
    ]
    np.testing.assert_allclose(made["q"], stats.false_discovery_control(made["p"]), atol=1e-9)
    alone = compare(table, pair=("a", "c"))
    same = made.filter(a="a", b="c")
    for name in ("difference", "low", "high", "p"):
        np.testing.assert_allclose(same[name], alone[name], atol=1e-12)
    assert (same["p_fwer"] >= alone["p_fwer"]).all()
    with raises(InputError, "bad-pair", value="a"):
        compare(table, pair="a")


def test_models_with_other_numbers_of_heads_say_so() -> None:
    """Heads are matched by number, which means little between two architectures."""
    table = pl.concat([masses(models=["a"], heads=2), masses(models=["b"], heads=5, layers=3)])
    made = compare(table)
    assert made.select("layer", "head").n_unique() == 4
    assert made["note"].str.contains("heads are matched by number, and a has 0–1, b 0–4").all()
    assert made["note"].str.contains("layers are matched by number, and a has 0–1, b 0–2").all()


FACTS = pl.DataFrame(
    {
        "prompt": range(24),
        "level": [i % 3 for i in range(24)],
        "document": [f"d{i // 3}" for i in range(24)],
    }
)


def alike(m: str, p: int, c: str, layer: int, head: int, item: str) -> float:
    """Differences that prompts of one document share, but for a little."""
    rng = np.random.default_rng([p // 3, layer, head])
    own = np.random.default_rng([p, layer, head, 1])
    return 1.0 + (m == "tuned") * float(rng.normal(0.3, 1) + own.normal(0, 0.1))


def test_clusters_are_the_units() -> None:
    table = masses(alike, prompts=range(24), items=["hash"])
    plain = compare(table, prompts=FACTS)
    made = compare(table, prompts=FACTS, cluster="document")
    assert plain["units"].to_list() == plain["n"].to_list() == [24] * 6
    assert made["units"].to_list() == [8] * 6
    assert made["n"].to_list() == [24] * 6
    np.testing.assert_allclose(made["difference"], plain["difference"], atol=1e-12)
    wider = (made["high"] - made["low"]).to_numpy() / (plain["high"] - plain["low"]).to_numpy()
    assert (wider > 1.4).all()
    assert (made["icc"] > 0.9).all()
    assert (made["design_effect"] > 2).all()
    assert plain["note"].str.contains("document").all()
    assert not made["note"].str.contains("alike").any()
    # The clusters' means, by themselves.
    means = (
        table.with_columns(pl.col("prompt") // 3)
        .group_by([c for c in table.columns if c not in ("value", "uniform", "tokens")])
        .agg(pl.col("value", "uniform", "tokens").mean())
        .select(table.columns)
    )
    by_hand = compare(means.sort("model", "prompt", "layer", "head"))
    for name in ("difference", "low", "high", "p", "q", "p_fwer"):
        np.testing.assert_allclose(made[name], by_hand[name], atol=1e-9)


def test_few_clusters_decide_nothing() -> None:
    facts = FACTS.with_columns(document=pl.col("prompt") // 6)
    made = compare(masses(alike, prompts=range(24)), prompts=facts, cluster="document")
    assert made["low"].null_count() == made["p"].null_count() == made.height
    assert "4 units" in made["note"][0]


def test_strata_narrow_the_interval() -> None:
    def value(m: str, p: int, c: str, layer: int, head: int, item: str) -> float:
        own = np.random.default_rng([p, layer, head]).normal()
        return 5.0 + (m == "tuned") * (p % 3 + 0.1 * float(own))

    table = masses(value, prompts=range(24), items=["hash"])
    plain, made = (compare(table, prompts=FACTS, strata=s) for s in (None, "level"))
    assert ((made["high"] - made["low"]) < 0.3 * (plain["high"] - plain["low"])).all()
    assert (made["design_effect"] < 0.1).all()
    with raises(InputError, "unknown-metadata-column", value="levle"):
        compare(table, prompts=FACTS, strata="levle")


def test_no_difference_is_a_finding() -> None:
    def value(m: str, p: int, c: str, layer: int, head: int, item: str) -> float:
        shift = {0: 0.0, 1: 0.02, 2: 0.5}[head] * (m == "tuned")
        own = np.random.default_rng([p, layer, head, m == "tuned"]).normal()
        return 1.0 + shift + 0.02 * float(own)

    table = masses(value, prompts=range(40), layers=1, items=["hash"])
    open_, by_number, by_share = (compare(table, margin=s) for s in (None, 0.1, "10%"))
    assert open_["outcome"].to_list() == ["undetermined", "different", "different"]
    assert "q_equivalence" not in open_.columns
    for made in (by_number, by_share):
        assert made["outcome"].to_list() == ["no difference", "different, but small", "different"]
        assert made["margin"].to_list() == pytest.approx([0.1] * 3, abs=0.01)
    # Two one-sided tests agree with the 90 % interval lying within.
    narrow = compare(table, level=0.9)
    inside = (narrow["low"] > -0.1) & (narrow["high"] < 0.1)
    assert (by_number["p_equivalence"] < 0.05).to_list() == inside.to_list()
    for bad in (0, -1, "many", "0%"):
        with raises(InputError, "bad-margin", value=bad):
            compare(table, margin=bad)


def test_a_ratio_needs_means_above_0() -> None:
    def value(m: str, p: int, c: str, layer: int, head: int, item: str) -> float:
        own = float(np.random.default_rng([p, layer, head, m == "tuned"]).normal())
        return {0: 2.0 + (m == "tuned") + 0.1 * own, 1: own, 2: -2.0 + 0.1 * own}[head]

    made = compare(masses(value, prompts=range(30), layers=1, items=["hash"]))
    clear, unclear, negative = made.iter_rows(named=True)
    assert clear["ratio_low"] < 1.5 < clear["ratio_high"]
    assert clear["ratio_high"] - clear["ratio_low"] < 0.1
    assert unclear["ratio_low"] is None  # dividing by what may be 0
    assert negative["ratio"] is None
    assert "no ratio: a mean is not above 0" in negative["note"]


def test_what_could_have_been_found() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=40)
    d = base - base.mean() + 0.0
    made = compare(
        masses(
            lambda m, p, *at: 3.0 + (m == "tuned") * float(d[p]),
            prompts=range(40),
            layers=1,
            heads=1,
            items=["hash"],
        )
    ).row(0, named=True)
    # Cohen: 0.8 at 40 pairs is an effect of about 0.454, by Student's t alone.
    assert 0.454 * d.std(ddof=1) <= made["detectable"] <= 0.475 * d.std(ddof=1)


def test_two_level_families() -> None:
    table = masses(prompts=range(20))
    apart, two = (compare(table, families=how) for how in ("each", "two-level"))
    assert (two["q"] >= apart["q"] - 1e-12).all()
    with raises(InputError, "unknown-way-to-correct-families", value="both"):
        compare(table, families="both")


def test_few_informative_prompts_decide_nothing() -> None:
    """24 prompts, 20 of one difference: sign flips alone, which ask for symmetry, call it real."""

    def value(m: str, p: int, c: str, layer: int, head: int, item: str) -> float:
        own = {0: 0.1 if p < 20 else 0.3 + 0.01 * p, 1: 0.1 + 0.01 * p}[head]
        return 1.0 + (own if m == "tuned" else 0.0)

    made = compare(masses(value, prompts=range(24), layers=1, heads=2, items=["hash"]))
    few, all_differ = made.iter_rows(named=True)
    assert few["informative"] == 4
    assert few["p"] == few["min_p"] == 2**-3
    assert few["unreliable"]
    assert few["outcome"] == "undetermined"
    assert "4 of 24" in few["note"]
    assert all_differ["informative"] == 24
    assert all_differ["outcome"] == "different"


def test_skewed_differences_are_marked_as_unreliable() -> None:
    def value(m: str, p: int, c: str, layer: int, head: int, item: str) -> float:
        own = 2.0**p if head else 100.0 + p
        return 1.0 + (own if m == "tuned" else 0.0)

    made = compare(masses(value, prompts=range(14), layers=1, heads=2, items=["hash"]))
    even, skewed = made.iter_rows(named=True)
    assert (even["unreliable"], skewed["unreliable"]) == (False, True)
    assert skewed["note"] != (even["note"] or "")
    assert skewed["skew"] > 0.3 > abs(even["skew"])


def test_mostly_one_value_is_not_shown_to_be_no_difference() -> None:
    def value(m: str, p: int, c: str, layer: int, head: int, item: str) -> float:
        return 1.0 + (0.01 * p if m == "tuned" and p < (3, 12)[head] else 0.0)

    table = masses(value, prompts=range(12), layers=1, heads=2, items=["hash"])
    few, enough = compare(table, margin=0.5).iter_rows(named=True)
    assert (few["p_equivalence"], few["outcome"]) == (1.0, "undetermined")
    assert enough["outcome"] == "different, but small"
