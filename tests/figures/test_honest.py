"""Captions and descriptions agree with the data: choices, decisions, omissions, few prompts."""

from __future__ import annotations

import re
from dataclasses import replace

import polars as pl
import pytest

from attnscope.errors import InputError
from attnscope.figures import draw
from attnscope.figures.caption import HOLLOW
from attnscope.figures.numbers import PAIRED
from attnscope.figures.summary import summary
from attnscope.run.tables import combine
from attnscope.stats.run_stats import compare_run
from made_runs import MadeRun, made_run
from reading_back import section, table_in
from support_errors import raises


def asking(run: MadeRun, **keys: object) -> MadeRun:
    """The run of an experiment that asks for more than the made one."""
    return replace(run, experiment=run.experiment.with_keys(**keys))


def test_an_experiment_that_asks_for_lift_gets_lift() -> None:
    run = asking(made_run(models=("one",), layers=(0,)), normalise="lift")
    figure = draw(run, "token-types")
    row = figure.data.filter(pl.col("class") == "star").row(0, named=True)
    of_star = pl.col("measure") == "mass", pl.col("item") == "star"
    heads = run.values.filter(*of_star).collect().group_by("prompt")
    by_prompt = heads.agg(pl.col("value").mean() / pl.col("uniform").first())
    assert row["value"] == pytest.approx(by_prompt["value"].mean(), rel=1e-5)
    assert "lift" in figure.caption.lower()
    assert "total" not in set(figure.data["class"])
    assert figure.data["bottom"].unique().to_list() == [0.0]


@pytest.mark.parametrize("how", ["lift", "per-token"])
def test_what_does_not_add_up_is_not_stacked(how: str) -> None:
    figure = draw(made_run(), "token-types", normalise=how)
    assert figure.data["top"].to_list() == figure.data["value"].to_list()
    assert "xOffset" in str(figure.spec)
    with raises(InputError, "conflicting-options", normalise=how):
        draw(made_run(), "token-types", normalise=how, uniform=True)


def test_captions_state_that_heads_are_averaged_although_the_experiment_keeps_each() -> None:
    run = asking(made_run(), combine="each")
    for name in ("token-types", "classes", "depth", "flow"):
        caption = draw(run, name).caption
        assert "`head-map`" in caption
        assert "`head-map`" not in draw(run, name, combine="sum").caption


def test_lambda_and_uniformity_are_of_the_queries_that_are_drawn() -> None:
    run = made_run(
        models=("m",),
        conditions={"base": 0, "slashes": 9, "sentence": 9},
        profile_heads=(0,),
        measures=("lambda", "uniformity"),
        heads=1,
        layers=(0,),
    )
    last = run.values.with_columns(
        pl.lit("last").alias("queries"),
        pl.when(pl.col("condition") == "sentence").then(0.25).otherwise(0.5).alias("value"),
    )
    both = replace(
        asking(run, queries=["all", "last"], measures=["lambda", "uniformity"]),
        values=pl.concat([run.values, last]),
        positions=pl.concat(
            [run.positions, run.positions.with_columns(pl.lit("last").alias("queries"))]
        ),
    )
    for queries, expected in (("all", "λ = 0.9"), ("last", "λ = 0.5 ")):
        assert expected in draw(both, "filler-profile", queries=queries).description
    uniformity = draw(both, "filler-vs-sentence", queries="last").description
    assert "| slashes | sentence | 0.25 |" in uniformity
    unmeasured = replace(both, values=run.values)
    assert "λ =" not in draw(unmeasured, "filler-profile", queries="last").description


def test_the_keys_of_a_lambda_are_named_if_there_are_several() -> None:
    run = made_run(
        models=("m",),
        conditions={"base": 0, "slashes": 9},
        profile_heads=(0,),
        measures=("lambda",),
        heads=1,
        layers=(0,),
    )
    other = run.values.with_columns(pl.lit("not-first").alias("keys"), pl.lit(0.5).alias("value"))
    both = replace(asking(run, keys=["all", "not-first"]), values=pl.concat([run.values, other]))
    assert "λ (keys: all) = 0.9" in draw(both, "filler-profile").description
    chosen = draw(both, "filler-profile", keys="not-first").description
    assert "λ (keys: not-first) = 0.5 " in chosen
    caption = draw(both, "lambda", keys="not-first").caption
    assert "keys: not-first" in caption
    assert "not-first" not in draw(both, "lambda").caption


def test_an_insertion_of_nothing_is_a_variant() -> None:
    run = made_run(models=("one",), conditions={"base": 0, "empty": 9})
    cells = run.cells.with_columns(pl.col("filler_tokens", "boundary_tokens") * 0)
    empty = {"base": {}, "empty": {"insert": {"kind": "repeat", "unit": "/", "count": 0}}}
    figure = draw(replace(asking(run, conditions=empty), cells=cells), "effect-heads")
    assert re.search("empty minus base, model.* one", figure.caption)


def test_only_undefined_values_of_what_is_shown_are_counted() -> None:
    run = made_run(models=("one",), layers=(0, 1, 2), heads=2, prompts=3)
    in_layer = (pl.col("measure") == "flow") & (pl.col("item") == "star")

    def without(layer: int) -> MadeRun:
        gone = in_layer & (pl.col("layer") == layer)
        value = pl.when(gone).then(None).otherwise("value").alias("value")
        return replace(run, values=run.values.with_columns(value))

    assert "undefined" not in draw(without(1), "flow").caption
    # A class of queries, 5 of keys, 2 heads, 3 prompts.
    assert "30 undefined" in draw(without(0), "flow").caption


def test_values_of_fewer_prompts_are_marked() -> None:
    run = made_run(models=("one",), layers=(0, 1))
    gone = (pl.col("item") == "star") & (pl.col("layer") == 0) & (pl.col("prompt") > 0)
    value = pl.when(gone).then(None).when(pl.col("item") == "star").then(9.0).otherwise("value")
    figure = draw(replace(run, values=run.values.with_columns(value.alias("value"))), "lift")
    largest = section(figure.description, "Largest and smallest")[0]
    assert "layer 0, star (n = 1)" in largest
    assert "layer 1, star" in largest
    assert "layer 1, star (n" not in largest
    assert HOLLOW in figure.caption
    assert "datum.low === null" in str(figure.spec)
    assert HOLLOW not in draw(run, "lift").caption


def test_significant_differences_are_those_of_the_comparison() -> None:
    run = made_run(prompts=7, layers=(0, 1))
    # In layer 0 four of seven rise, and three fall.
    rises = [0.1, 0.2, 0.15, 0.05, -0.11, -0.1, -0.2]
    rise = pl.col("prompt").replace_strict(dict(enumerate(rises)), return_dtype=pl.Float64)
    steady = 0.1 + 0.001 * pl.col("prompt")
    second = (pl.col("model") == "spatial-base").cast(pl.Float64)
    flat = pl.when(pl.col("layer") == 0).then(0.3 + second * rise).otherwise(0.3 + second * steady)
    run = replace(run, values=run.values.with_columns(flat.alias("value")))
    compared = compare_run(run).filter(pl.col("measure") == "mass")
    assert (compared.filter(pl.col("layer") == 0)["p"] > 0.05).all()
    holds = (pl.col("q") < 0.05) & ((pl.col("low") > 0) | (pl.col("high") < 0))
    lines = section(draw(run, "classes").description, "Differences")
    head, body = table_in(lines)
    rows = [dict(zip(head, cells, strict=True)) for cells in body]
    held = {(int(r["layer"]), r["class"]) for r in rows if r["significant"] == "True"}
    assert held == set(compared.filter(holds).select("layer", "item").iter_rows())
    assert {layer for layer, _ in held} == {1}


def test_intervals_resample_the_chosen_clusters() -> None:
    """Intervals, tests, captions and claims of a figure by cluster, as `summary` has them."""
    metadata = pl.DataFrame({"prompt": range(24), "document": [p // 3 for p in range(24)]})
    run = replace(made_run(prompts=24, layers=(0,)), prompts=metadata)
    plain, by = (
        draw(run, "classes", **units)
        for units in ({}, {"cluster": "document"})  # type: ignore[arg-type]
    )
    values = run.values.filter(pl.col("measure") == "mass", pl.col("item") == "star")
    values = combine(values.filter(pl.col("model") == "spatial-phys"))
    (expected,) = summary(values, prompts=metadata, cluster="document").to_dicts()
    row = by.data.filter(pl.col("class") == "star", pl.col("model") == "spatial-phys")
    assert row["low"].item() == pytest.approx(expected["low"], rel=1e-4)
    assert not by.data["low"].equals(plain.data["low"])
    assert by.data["value"].equals(plain.data["value"])
    assert "n = 24 prompts in 8 clusters (document)" in by.caption
    assert "95 % confidence interval over clusters" in by.description
    assert "over clusters" not in plain.description
    few = draw(run, "effect-heads", cluster="document", prompts=list(range(15)))
    assert "in 5 clusters (document)" in few.caption
    assert few.data["q"].null_count() == few.data.height
    with pytest.raises(InputError):
        draw(run, "classes", cluster="topic")


@pytest.mark.parametrize(("number", "pairs"), [(3, 3), (PAIRED + 1, PAIRED)])
def test_of_many_models_each_is_compared_with_the_first(number: int, pairs: int) -> None:
    names = [f"m{n}" for n in range(number)]
    run = made_run(models=names, layers=(0,), heads=1, prompts=6, measures=("entropy",))
    description = draw(run, "depth").description
    compared = re.findall(r"\| m\d \| (m\d) \| ", description)
    assert len(compared) == pairs
    assert (set(compared) == {"m0"}) == (number > PAIRED)
