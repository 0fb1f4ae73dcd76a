"""Filler figures: alignment, spans, binning, labels."""

from __future__ import annotations

import re

import polars as pl
import pytest

from attnscope.errors import InputError
from attnscope.figures import draw
from made_runs import made_run
from support_errors import raises

CONDITIONS = {"base": 0, "slashes": 9, "sentence": 9}


def test_original_tokens_are_drawn_at_their_aligned_positions() -> None:
    run = made_run(models=("m",), prompts=2, conditions=CONDITIONS, profile_heads=(1,), length=30)
    data = draw(run, "filler-profile").data
    above = data.filter(pl.col("panel") == "original tokens")
    positions = run.positions.filter(pl.col("prompt") == 0).collect()
    base = positions.filter(pl.col("condition") == "base").sort("position")["average"]
    variant = positions.filter(pl.col("condition") == "slashes").sort("position")["average"]
    # Ten tokens precede a boundary token, nine fillers and another boundary token.
    aligned = pl.concat([variant[:10], variant[21:]])
    for series, expected in (("without filler", base), ("with filler", aligned)):
        line = above.filter(pl.col("series") == series)
        assert line["position"].to_list() == list(range(30))
        assert line["value"].to_list()[:-1] == pytest.approx(expected.to_list()[:-1], rel=1e-5)
        assert line["value"].to_list()[-1] is None
    below = data.filter(pl.col("panel") == "whole sequence")
    assert below.height == 41
    assert below.filter(pl.col("role") == "filler")["position"].to_list() == list(range(11, 20))


def test_a_mean_over_prompts_is_a_mean_at_each_index() -> None:
    run = made_run(models=("m",), prompts=3, conditions=CONDITIONS, profile_heads=(1,), length=30)
    figure = draw(run, "filler-profile", mean=True)
    row = figure.data.filter(
        pl.col("panel") == "original tokens",
        pl.col("series") == "without filler",
        pl.col("position") == 4,
    ).row(0, named=True)
    expected = run.positions.filter(pl.col("condition") == "base", pl.col("position") == 4)
    assert row["value"] == pytest.approx(expected.collect()["average"].mean(), rel=1e-5)
    assert row["n"] == 3
    assert "n = 3" in figure.caption


def test_lambda_over_all_prompts_is_stated_with_its_interval() -> None:
    measures = ("lambda", "uniformity")
    run = made_run(
        models=("m",), conditions=CONDITIONS, profile_heads=(1,), measures=measures, heads=2
    )
    text = draw(run, "filler-profile").description
    assert "layer 0, head 1: λ = 0.9" in text
    assert "n = 12)" in text
    other = draw(run, "filler-vs-sentence").description
    assert re.search(r"\| slashes \| sentence \| [-\d.]+", other)


def test_each_model_may_have_its_own_head() -> None:
    run = made_run(models=("a", "b"), conditions=CONDITIONS, profile_heads=(0, 1, 2))
    data = draw(run, "filler-vs-sentence", heads={"a": 2, "b": 1}).data
    assert data.select("model", "head").unique().sort("model").rows() == [("a", 2), ("b", 1)]
    assert data["series"].unique(maintain_order=True).to_list() == [
        "filler (slashes)",
        "random sentence",
    ]


@pytest.mark.slow
def test_long_profiles_are_binned() -> None:
    run = made_run(
        models=("m",),
        prompts=1,
        layers=(0,),
        heads=1,
        conditions={"base": 0, "slashes": 900},
        profile_heads=(0,),
        measures=(),
        length=3_000,
    )
    figure = draw(run, "filler-profile")
    whole = figure.data.filter(pl.col("panel") == "whole sequence")
    assert whole.height <= 610
    assert "bins of 7 tokens" in figure.caption
    positions = run.positions.filter(pl.col("condition") == "slashes").collect()
    assert whole["max"].max() == pytest.approx(positions["average"].max(), rel=1e-5)
    assert whole["tokens"].sum() == positions["average"].count()
    assert whole.filter(pl.col("role") == "filler")["tokens"].sum() == 900
    assert len(str(figure.interactive)) > 2 * len(str(figure.spec))


def test_the_first_token_can_be_left_out() -> None:
    run = made_run(models=("m",), conditions=CONDITIONS, profile_heads=(0,))
    for name in ("filler-profile", "filler-vs-sentence", "text"):
        figure = draw(run, name, leave_out_first=True)
        kept = figure.data
        if "panel" in kept.columns:
            kept = kept.filter(pl.col("panel") != "inserted span")
        assert kept["position"].min() == 1


def test_what_does_not_fit_is_refused() -> None:
    run = made_run(models=("m",), conditions=CONDITIONS, profile_heads=(0,))
    variants = ["slashes", "sentence"]
    with raises(InputError, "unknown-condition", value="dots", known=["base", *variants]):
        draw(run, "filler-profile", conditions=["dots"])
    with raises(InputError, "number-of-conditions", conditions=variants, known=variants):
        draw(run, "filler-profile", conditions=["slashes", "sentence"])
    with raises(InputError, "number-of-conditions", conditions=["slashes"], known=variants):
        draw(run, "filler-vs-sentence", conditions=["slashes"])
    with raises(InputError, "unknown-head", value=5, known=[0]):
        draw(run, "filler-profile", heads=[5])
    only_filler = made_run(models=("m",), conditions={"base": 0, "slashes": 9}, profile_heads=(0,))
    with raises(InputError, "nothing-to-compare", conditions=["base", "slashes"]):
        draw(only_filler, "filler-vs-sentence")
    with raises(InputError, "nothing-to-compare", conditions=["base"]):
        draw(made_run(profile_heads=(0,)), "filler-profile")
