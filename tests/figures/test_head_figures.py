"""Figures of single heads: a map of any value, and heads in the order of their values."""

from __future__ import annotations

import re
from dataclasses import replace

import polars as pl
import pytest

from attnscope.errors import InputError
from attnscope.figures import Style, draw
from attnscope.figures.shapes import matrix
from attnscope.figures.theme import PUBLISHED
from attnscope.spec.claims import make_claims
from made_runs import made_run
from support_errors import raises


def test_a_cell_is_the_mean_over_prompts_of_one_head() -> None:
    run = made_run(models=("one", "two"), conditions={"base": 0, "slashes": 9})
    figure = draw(run, "head-map", items=["star", "hash"])
    assert figure.data["panel"].unique(maintain_order=True).to_list() == ["star", "hash"]
    for row in figure.data.sample(7, seed=1).iter_rows(named=True):
        of = run.values.filter(
            pl.col("model") == "one",
            pl.col("condition") == "base",
            pl.col("measure") == "mass",
            pl.col("item") == row["panel"],
            pl.col("layer") == row["layer"],
            pl.col("head") == row["head"],
        ).collect()
        assert row["value"] == pytest.approx(of["value"].mean(), rel=1e-5)
        assert row["n"] == of.height == 12
    for term in ("one", "1 of 2 models", "layers 0–3", "condition: base"):
        assert term in figure.caption
    assert "two" not in figure.caption


def test_one_model_and_one_condition_have_a_map() -> None:
    run = made_run(models=("alone",), measures=("entropy",))
    for name in ("head-map", "head-strip"):
        assert draw(run, name).data.height == 16
    assert "entropy" in draw(run, "head-map").title.lower()
    with raises(InputError, "not-measured", missing=["lambda"], known=["entropy"]):
        draw(run, "head-map", measure="lambda")


def test_models_and_conditions_asked_for_have_panels_of_their_own() -> None:
    run = made_run(models=("one", "two"), conditions={"base": 0, "slashes": 9})
    both = draw(run, "head-map", models=["one", "two"], items=["star"])
    assert both.data["panel"].unique(maintain_order=True).to_list() == ["one, star", "two, star"]
    conditions = draw(run, "head-strip", conditions=["base", "slashes"], items=["star"])
    panels = conditions.data["panel"].unique(maintain_order=True).to_list()
    assert panels == ["base, star", "slashes, star"]
    flow = draw(run, "head-map", measure="flow", items=["hash"]).data["panel"]
    assert "hash → star" in set(flow)


@pytest.mark.parametrize(
    ("panels", "layers", "heads", "cell"), [(5, 28, 28, 7), (5, 80, 64, 5), (12, 126, 128, 2)]
)
def test_a_map_of_many_heads_fits_into_two_screens(
    panels: int, layers: int, heads: int, cell: float
) -> None:
    columns, wide, tall = matrix.Matrix()._layout(
        panels, heads, layers, Style(width=900), separate=True, texts=False
    )
    assert min(wide, tall) >= cell
    assert columns * (wide * heads) <= 1_300
    assert -(-panels // columns) * (tall * layers + 60) <= 1_700


def test_a_panel_has_its_own_colours_unless_they_are_shared() -> None:
    run = made_run(models=("one",))
    tops = {}
    for scale in ("panel", "shared"):
        (chart,) = draw(run, "head-map", scale=scale).spec["vconcat"]
        colours = [panel["layer"][0]["encoding"]["color"] for panel in chart["concat"]]
        tops[scale] = [colour["scale"]["domain"][-1] for colour in colours]
    data = draw(run, "head-map").data
    largest = [part["value"].max() for part in data.partition_by("panel", maintain_order=True)]
    assert tops["panel"] == largest
    assert set(tops["shared"]) == {max(largest)}


def test_colours_of_lift_begin_at_0_and_are_white_at_1() -> None:
    shape = matrix.Matrix(rule=1.0)
    for values, domain in (
        ([0.2, 3.0], [0.0, 0.5, 1.0, 2.0, 3.0]),
        ([0.9, 1.2], [0.8, 0.9, 1.0, 1.1, 1.2]),
        ([-1.0, 2.0], [-1.0, 0.0, 1.0, 2.0, 3.0]),
    ):
        stops, colours = shape._scale(pl.DataFrame({"value": values}), PUBLISHED)
        assert stops == pytest.approx(domain)
        assert colours == PUBLISHED.diverging


def test_lift_of_a_head_is_its_mass_over_uniform_mass() -> None:
    run = made_run(models=("one", "two"))
    of_star = pl.col("measure") == "mass", pl.col("item") == "star"
    lifts = run.values.filter(*of_star).with_columns(pl.col("value") / pl.col("uniform"))
    means = lifts.group_by("model", "layer", "head").agg(pl.col("value").mean()).collect()
    data = draw(run, "head-map", items=["star"], normalise="lift").data
    both = data.join(means.filter(model="one"), on=["layer", "head"], suffix="_by_hand")
    assert both["value"].to_list() == pytest.approx(both["value_by_hand"].to_list(), rel=1e-5)
    difference = draw(run, "effect-heads", items=["star"], normalise="lift").data
    wide = means.pivot("model", index=["layer", "head"], values="value")
    both = difference.join(wide, on=["layer", "head"])
    assert both["difference"].to_list() == pytest.approx(
        (both["two"] - both["one"]).to_list(), rel=1e-4
    )


def test_class_minus_class_in_each_head() -> None:
    run = made_run(models=("one", "two"))
    figure = draw(run, "class-difference", items=["star", "hash"])
    assert figure.data["model"].unique(maintain_order=True).to_list() == ["one", "two"]
    row = figure.data.row(7, named=True)
    of_head = [pl.col(c) == row[c] for c in ("model", "layer", "head")]
    values = run.values.filter(pl.col("measure") == "mass", *of_head).collect()
    means = {item: values.filter(item=item)["value"].mean() for item in ("star", "hash")}
    assert row["difference"] == pytest.approx(means["star"] - means["hash"], rel=1e-4)
    with raises(InputError, "number-of-classes"):
        draw(run, "class-difference", items=["star"])
    with raises(InputError, "number-of-classes"):
        draw(run, "class-difference")
    line = "mass[class=word] > mass[class=star] in most heads"
    claimed = replace(run, claims=make_claims({"words": line}, "test"))
    assert "word minus" in draw(claimed, "class-difference").caption


def test_heads_stand_in_the_order_of_their_values() -> None:
    figure = draw(made_run(models=("one",)), "head-strip")
    for part in figure.data.partition_by("panel"):
        assert part["rank"].to_list() == list(range(16))
        assert part["value"].to_list() == sorted(part["value"], reverse=True)
        first = part.row(0, named=True)
        assert first["name"] == f"L{first['layer']} H{first['head']}"
    assert "95 %" in figure.caption
    many = made_run(models=("one",), prompts=6, layers=range(10), heads=10, measures=("entropy",))
    assert "95 %" not in draw(many, "head-strip").caption


@pytest.mark.parametrize(("depths", "numbers"), [(10, True), (20, False)])
def test_numbers_stand_in_cells_that_hold_them(depths: int, numbers: bool) -> None:
    known = {"prompt": range(depths), "depth": [n / depths for n in range(depths)]}
    run = made_run(models=("one",), prompts=depths, layers=(0,), heads=2, measures=("entropy",))
    run = replace(run, prompts=pl.DataFrame({**known, "length": [100] * depths}))
    (chart,) = draw(run, "needle-map", measure="entropy").spec["vconcat"]
    layers = chart["concat"][0]["layer"]
    assert ("text" in {layer["mark"]["type"] for layer in layers}) is numbers


def test_models_are_compared_in_the_base_however_conditions_are_listed() -> None:
    run = made_run(models=("one", "two"), conditions={"base": 0, "slashes": 9})
    figure = draw(run, "effect-heads", conditions=["slashes", "base"])
    assert re.search("two minus one, condition.* base", figure.caption)
