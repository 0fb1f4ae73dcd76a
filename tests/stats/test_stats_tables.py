"""Heads combined, masses normalised, tables turned into matrices: against numbers by hand."""

import numpy as np
import polars as pl
import pytest

from attnscope.errors import InputError
from attnscope.figures.summary import summary
from attnscope.run import tables
from attnscope.run.tables import IDENTITY, combine, matrix, normalise, ranges
from made_values import masses, measured
from support_errors import raises


def pick(table: pl.DataFrame, **where: object) -> float | None:
    found = table.filter(**where)
    assert found.height == 1
    value: float | None = found["value"][0]
    return value


HERE = {"model": "base", "prompt": 3, "layer": 1, "item": "star"}


@pytest.mark.parametrize("how", ["mean", "sum", "max"])
def test_heads_combine_per_prompt(how: str) -> None:
    table = masses()
    by_hand = getattr(np, how)([pick(table, **HERE, head=head) for head in range(3)])
    together = combine(table, how)
    assert pick(together, **HERE) == pytest.approx(by_hand, abs=1e-12)
    assert together["head"].null_count() == together.height == table.height // 3
    assert together.schema == table.drop("error").schema


def test_each_head_stays() -> None:
    table = masses()
    assert combine(table.lazy(), "each").equals(table.drop("error"))


def test_an_undefined_head_makes_its_layer_undefined() -> None:
    undefined = (3, 1, 2, "star")
    table = masses(lambda m, p, c, lay, h, i: None if (p, lay, h, i) == undefined else 0.2)
    for how in ("mean", "sum", "max"):
        together = combine(table, how)
        assert pick(together, **HERE) is None
        assert together["value"].null_count() == 2  # both models, nothing else


def test_numbers_of_a_whole_layer_are_not_combined() -> None:
    table = measured("affine_r2", lambda *at: 0.5, heads=None)
    assert combine(table, "sum").equals(table.drop("error"))


def test_normalisations_by_hand() -> None:
    table = combine(masses(), "mean")
    value = pick(table, **HERE)
    other = pick(table, **{**HERE, "item": "hash"})
    assert value is not None
    assert other is not None
    assert pick(normalise(table, "mass"), **HERE) == value
    assert pick(normalise(table, "per-token"), **HERE) == pytest.approx(value / 6)
    assert pick(normalise(table, "lift"), **HERE) == pytest.approx(value / 0.13)
    assert pick(normalise(table, "share"), **HERE) == pytest.approx(value / (value + other))


def test_nothing_to_divide_by_is_null_not_infinite() -> None:
    table = masses().with_columns(tokens=pl.lit(0.0), uniform=pl.lit(0.0))
    for how in ("per-token", "lift"):
        assert normalise(table, how)["value"].null_count() == table.height


def test_other_measures_are_not_normalised() -> None:
    table = measured("entropy", lambda *at: 1.5)
    assert normalise(table, "lift")["value"].to_list() == [1.5] * table.height


def test_sum_and_lift_agree() -> None:
    each, total = (normalise(combine(masses(), how), "lift") for how in ("mean", "sum"))
    assert pick(each, **HERE) == pytest.approx(pick(total, **HERE))


def test_unknown_names_list_the_known() -> None:
    with raises(InputError, "unknown-way-to-combine-heads"):
        combine(masses(), "median")
    with raises(InputError, "unknown-normalisation"):
        normalise(masses(), "lfit")


def test_summary_is_the_mean_with_its_interval() -> None:
    table = combine(masses(), "mean")
    made = summary(table, ["model", "layer", "item"])
    where = {"model": "tuned", "layer": 0, "item": "star"}
    row = made.filter(**where).row(0, named=True)
    x = table.filter(**where)["value"].to_numpy()
    assert row["mean"] == pytest.approx(x.mean(), abs=1e-12)
    assert row["low"] < row["mean"] < row["high"]
    assert row["n"] == 12
    assert made.height == 2 * 2 * 2


def test_summary_counts_the_prompts_with_a_value() -> None:
    made = summary(measured("lambda", lambda m, p, *at: None if p < 4 else 0.5))
    assert made["n"].unique().to_list() == [8]
    assert made["mean"].unique().to_list() == [0.5]


def test_summary_of_clusters_and_of_few_prompts() -> None:
    table = masses(models=["base"], heads=1)
    facts = pl.DataFrame({"prompt": range(12), "pair": [p // 2 for p in range(12)]})
    made = summary(table, prompts=facts, cluster="pair")
    assert made["units"].unique().to_list() == [6]
    assert made["n"].unique().to_list() == [12]
    assert made["low"].null_count() == 0
    few = summary(table.filter(pl.col("prompt") < 5))
    assert few["low"].null_count() == few["high"].null_count() == few.height
    assert few["mean"].null_count() == 0


def test_an_error_of_sampling_is_in_the_spread_over_prompts_already() -> None:
    """1,000 sets of 12 prompts, half of whose variance is the error of estimating each: intervals
    cover the mean over all prompts as often as they say, and would be too wide with it added."""
    rng = np.random.default_rng(0)
    shown = rng.normal(size=(12, 1000)) + rng.normal(size=(12, 1000))
    table = measured(
        "entropy", lambda m, p, c, lay, h: shown[p, lay], layers=1000, heads=1, error=1.0
    )
    made = summary(combine(table))
    low, high = made["low"].to_numpy(), made["high"].to_numpy()
    assert 0.93 <= ((low <= 0) & (high >= 0)).mean() <= 0.97


@pytest.mark.parametrize("how", ["mean", "sum", "max"])
def test_a_row_that_stands_twice_is_refused(how: str) -> None:
    table = masses()
    with raises(InputError, "duplicate-row"):
        combine(pl.concat([table, table.head(1)]), how)


def test_several_values_per_prompt_are_refused() -> None:
    with raises(InputError, "several-values-per-prompt"):
        summary(masses(), ["model", "layer", "item"])


def test_matrix_keeps_prompts_in_rows() -> None:
    table = masses(lambda m, p, c, lay, h, i: p + 100 * lay, models=["base"], heads=1)
    made = matrix(table.sample(fraction=1, shuffle=True, seed=1), IDENTITY)
    assert made.prompts == list(range(12))
    layers = made.columns["layer"].to_numpy()
    np.testing.assert_array_equal(made.x, np.arange(12)[:, None] + 100 * layers)


def test_ranges() -> None:
    assert ranges([5, 0, 1, 2, 9, 8]) == "0–2, 5, 8–9"
    assert ranges([5, 0, 1, 2, 9, 8], 3) == "0–2, 5, 8, 9"


@pytest.mark.parametrize("how", ["mean", "max"])
def test_a_long_table_is_combined_some_models_at_a_time(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = masses(models=[f"m{n}" for n in range(5)])
    whole = combine(values, how)
    monkeypatch.setattr(tables, "HELD", values.height // 2)
    assert combine(values.lazy(), how).equals(whole)
