"""Comparisons against independent computations, one head at a time."""

import numpy as np
import polars as pl
import pytest
from scipy import stats

from attnscope.errors import InputError
from attnscope.stats.paired import compare
from attnscope.stats.resample import bca_unpaired, expanded
from made_values import masses, measured


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
        interval = stats.bootstrap(
            (d,),
            np.mean,
            n_resamples=999,
            confidence_level=expanded(0.95, 11),
            method="BCa",
            rng=np.random.default_rng(3),
        ).confidence_interval
        p = stats.permutation_test(
            (d,), np.mean, permutation_type="samples", n_resamples=np.inf
        ).pvalue
        by_hand = {
            "n": 11,
            "mean_a": a.mean(),
            "mean_b": b.mean(),
            "difference": d.mean(),
            "ratio": b.mean() / a.mean(),
            "effect": d.mean() / d.std(ddof=1),
            "low": interval.low,
            "high": interval.high,
        }
        for name, value in by_hand.items():
            assert row[name] == pytest.approx(value, abs=1e-9), name
        assert row["paired"]
        assert row["note"] == ""
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
        assert row["p"] == pytest.approx(theirs, abs=1e-9)


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


def test_orphans_are_listed() -> None:
    table = masses().filter((pl.col("model") == "tuned") | ~pl.col("prompt").is_in([2, 3, 4, 9]))
    with pytest.raises(InputError, match=r"model 'tuned' alone has.*prompts 2–4, 9.*paired=False"):
        compare(table)
    assert not compare(table, paired=False)["paired"].any()


def test_a_condition_that_one_model_lacks_is_an_orphan() -> None:
    table = masses(conditions=("none", "filler"))
    table = table.filter((pl.col("model") == "base") | (pl.col("condition") == "none"))
    with pytest.raises(InputError, match="'filler', prompts 0–11"):
        compare(table)


def test_different_prompts_are_compared_as_groups_and_it_says_so() -> None:
    table = masses(prompts=range(20)).filter((pl.col("model") == "base") == (pl.col("prompt") < 9))
    made = compare(table, resamples=999, seed=3)
    for row in made.iter_rows(named=True):
        where = {key: row[key] for key in ("layer", "head", "item")}
        a, b = columns(table, "model", ("base", "tuned"), **where)
        low, high = bca_unpaired(a, b, resamples=999, seed=3)  # itself checked against scipy
        pooled = np.sqrt((8 * a.var(ddof=1) + 10 * b.var(ddof=1)) / 18)
        assert (row["n"], row["n_a"], row["n_b"]) == (20, 9, 11)
        assert row["difference"] == pytest.approx(b.mean() - a.mean(), abs=1e-9)
        assert row["effect"] == pytest.approx((b.mean() - a.mean()) / pooled, abs=1e-9)
        assert (row["low"], row["high"]) == pytest.approx((low[0], high[0]), abs=1e-9)
        assert not row["paired"]
        assert row["note"].startswith("unpaired: models base and tuned")


def test_fewer_than_six_prompts_have_no_p_value_and_say_why() -> None:
    made = compare(masses(prompts=range(5)))
    assert made["p"].null_count() == made["q"].null_count() == made.height
    assert made["difference"].null_count() == 0
    assert "no p-value: 5 prompts, and fewer than 6" in made["note"][0]
    assert compare(masses(prompts=range(6)))["p"].null_count() == 0


def test_constant_differences() -> None:
    made = compare(masses(lambda m, *at: 0.1 if m == "base" else 0.3))
    row = made.row(0, named=True)
    assert row["low"] == row["high"] == row["difference"] == pytest.approx(0.2)
    assert row["effect"] is None
    assert "constant" in row["note"]
    same = compare(masses(lambda m, p, *at: 0.1 * p)).row(0, named=True)
    assert (same["difference"], same["low"], same["high"], same["p"]) == (0, 0, 0, 1)


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
    with pytest.raises(InputError, match=r"here are 3: a, b, c; say which two"):
        compare(table)
    with pytest.raises(InputError, match=r"unknown model 'd'; known: a, b, c"):
        compare(table, pair=("a", "d"))
    with pytest.raises(InputError, match="with itself"):
        compare(table, pair=("a", "a"))
    made = compare(table, pair=("c", "a"))
    back = compare(table, pair=("a", "c"))
    np.testing.assert_allclose(made["difference"], -back["difference"].to_numpy(), atol=1e-12)
    np.testing.assert_allclose(made["p"], back["p"], atol=1e-12)
