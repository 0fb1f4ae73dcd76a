"""Comparisons against independent computations, one head at a time."""

import numpy as np
import polars as pl
import pytest

from attnscope.errors import InputError
from attnscope.stats.means import paired
from attnscope.stats.paired import compare
from made_values import masses, measured
from support_errors import raises


def columns(table: pl.DataFrame, over: str, pair: tuple[str, str], **where: object) -> list:
    return [
        table.filter(**{over: name}, **where).sort("prompt")["value"].to_numpy() for name in pair
    ]


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


def test_a_model_without_values_is_named() -> None:
    table = masses().filter(pl.col("model") == "base")
    with raises(InputError, "no-values", value="tuned"):
        compare(table, pair=[("base", "tuned")])


def test_a_base_without_values_of_its_own_says_what_to_compare() -> None:
    table = measured(
        "next_token_logprob",
        lambda model, prompt, condition, *_: prompt + (condition == "cut") * prompt**2,
        conditions=("base", "cut", "words"),
    )
    variants = table.filter(pl.col("condition") != "base")
    with raises(InputError, "already-changes", measures=["next_token_logprob"]):
        compare(variants, over="condition", pair=[("base", "cut")])
    assert compare(variants, over="condition", pair=("cut", "words")).height > 0


def test_rounding_is_not_an_effect() -> None:
    made = compare(masses(lambda m, p, *at: 0.3 if m == "base" else 0.1 + 0.2))
    assert made["p"].unique().to_list() == [1.0]


def test_undefined_values_leave_their_prompt_out_and_are_counted() -> None:
    table = masses(
        lambda m, p, c, lay, h, i: None if (m, p, i) == ("tuned", 3, "star") else 0.1 * p + lay
    )
    made = compare(table).filter(item="star")
    assert made["n"].unique().to_list() == [11]
    assert "prompts without a value, left out: 1" in made["note"][0]
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


def test_few_clusters_decide_nothing() -> None:
    facts = FACTS.with_columns(document=pl.col("prompt") // 6)
    made = compare(masses(alike, prompts=range(24)), prompts=facts, cluster="document")
    assert made["low"].null_count() == made["p"].null_count() == made.height
    assert "4 units" in made["note"][0]


def test_every_head_has_its_own_contrast() -> None:
    table = masses(heads=2, items=("hash",))
    rows = compare(table, over="model", combine="each")
    row = rows.row(0, named=True)
    sides = [
        table.filter(pl.col("model") == name, pl.col("layer") == 0, pl.col("head") == 0)["value"]
        for name in ("base", "tuned")
    ]
    contrast = paired(sides[0].to_numpy(), sides[1].to_numpy())
    assert row["p"] == pytest.approx(contrast.at(1.0).two_sided()[0])
    assert row["difference"] == pytest.approx(sides[1].mean() - sides[0].mean())
    assert (row["ratio"], row["ratio_low"]) == pytest.approx(
        [end[0] for end in contrast.ratio()][:2]
    )


def test_q_and_the_interval_decide_alike() -> None:
    rng = np.random.default_rng(1)
    rises = rng.normal(0.05, 0.05, 12)

    def value(model: str, prompt: int, *_: object) -> float:
        return 0.3 + (rises[prompt] if model == "tuned" else 0.0)

    row = compare(masses(value, layers=1, heads=1, items=("hash",))).row(0, named=True)
    assert (row["outcome"] == "different") == (row["low"] > 0 or row["high"] < 0)


def test_other_prompts_are_compared_as_groups() -> None:
    table = pl.concat(
        [masses(models=("base",)), masses(models=("tuned",), prompts=range(12, 24), seed=1)]
    )
    rows = compare(table)
    assert not rows["paired"].any()
    assert set(rows["units"]) == {12}


def test_fewer_than_six_prompts_cannot_tell() -> None:
    rows = compare(masses(prompts=range(5)), family_wise=True)
    assert set(rows["outcome"]) == {"cannot tell"}
    assert rows["p"].null_count() == rows["p_fwer"].null_count() == rows.height


def test_a_small_difference_is_about_none() -> None:
    noise = np.random.default_rng(2).normal(0, 0.0005, 12)

    def value(model: str, prompt: int, *_: object) -> float:
        return 0.3 + 0.01 * prompt + (0.001 + noise[prompt] if model == "tuned" else 0.0)

    table = masses(value, layers=1, heads=1, items=("hash",))
    assert compare(table, margin="5%")["outcome"].to_list() == ["about none"]
    assert compare(table, margin=0.01)["outcome"].to_list() == ["about none"]
    assert compare(table, margin=0.0001)["outcome"].to_list() == ["different"]


def test_an_estimated_margin_is_not_a_known_one() -> None:
    """A constant difference of 5 % of the mean is not shown to be below 5 %."""
    a = np.random.default_rng(3).gamma(4, 0.05, 30)

    def value(model: str, prompt: int, *_: object) -> float:
        return float(a[prompt]) + (0.05 * float(a.mean()) if model == "tuned" else 0.0)

    table = masses(value, prompts=range(30), layers=1, heads=1, items=("hash",))
    assert compare(table, margin="5%")["p_equivalence"][0] > 0.05


def test_clusters_are_the_units_of_a_comparison() -> None:
    metadata = pl.DataFrame({"prompt": range(12), "document": [n // 2 for n in range(12)]})
    rows = compare(masses(), prompts=metadata, cluster="document")
    assert set(rows["units"]) == {6}
    assert set(rows["n"]) == {12}


def test_all_pairs_are_corrected_together() -> None:
    table = masses(models=("a", "b", "c"))
    rows = compare(table, pair="all", family_wise=True)
    assert rows.select("a", "b").n_unique() == 3
    assert (rows["p_fwer"] >= rows["p"] - 1e-12).all()
    alone = compare(table.filter(pl.col("model") != "c"), family_wise=True)
    assert rows.filter(pl.col("b") == "b")["p_fwer"][0] >= alone["p_fwer"][0]


def test_classes_are_compared_with_one_another() -> None:
    rows = compare(masses(models=("m",)), over="item", pair=("hash", "star"))
    assert set(rows["a"]) == {"hash"}
    assert set(rows["model"]) == {"m"}
