"""Figures of single heads: a map of any value, and heads in the order of their values."""

from __future__ import annotations

import re
from dataclasses import replace

import altair as alt
import polars as pl
import pytest

from attnscope.errors import InputError
from attnscope.figures import draw
from attnscope.figures.charts import matrix
from made_runs import made_run
from reading_back import section
from support_errors import raises


def test_a_cell_is_the_mean_over_prompts_of_one_head() -> None:
    run = made_run(models=("one", "two"), conditions={"base": 0, "slashes": 9})
    figure = draw(run, "head-map")
    assert figure.data["panel"].unique(maintain_order=True).to_list() == [
        "hash",
        "star",
        "whitespace",
    ]
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


@pytest.mark.parametrize(("layers", "heads", "a_row"), [(28, 28, 3), (80, 64, 1)])
def test_a_map_of_many_heads_has_cells_of_at_least_7_pixels(
    layers: int, heads: int, a_row: int
) -> None:
    run = made_run(models=("m",), prompts=1, layers=range(layers), heads=heads, measures=("mass",))
    spec = draw(run, "head-map").spec
    assert spec["columns"] == a_row
    for panel in spec["concat"]:
        assert panel["width"] >= 7 * heads
        assert panel["height"] >= 7 * layers


def test_heads_stand_in_the_order_of_their_values() -> None:
    figure = draw(made_run(models=("one",)), "head-strip")
    for part in figure.data.partition_by("panel"):
        assert part["rank"].to_list() == list(range(16))
        assert part["value"].to_list() == sorted(part["value"], reverse=True)
        first = part.row(0, named=True)
        assert first["name"] == f"L{first['layer']} H{first['head']}"
    notes = section(figure.description, "Notes")
    top = figure.data.row(0, named=True)
    assert notes[0].startswith(f"- {top['panel']}: {top['name']} {top['value']:.6g}, ")
    assert "95 %" in figure.caption
    many = made_run(models=("one",), prompts=6, layers=range(10), heads=10, measures=("entropy",))
    assert "95 %" not in draw(many, "head-strip").caption


def test_layers_of_a_long_strip_are_drawn_below_it() -> None:
    """The dots of several hundred heads overlap, so that their colours cannot be read."""
    one = {"models": ("one",), "prompts": 1, "measures": ("entropy",)}
    short = draw(made_run(**one, layers=range(15), heads=20), "head-strip")
    long = draw(made_run(**one, layers=range(15), heads=21), "head-strip")
    assert "vconcat" not in short.spec
    assert len(long.spec["vconcat"]) == 2


@pytest.mark.parametrize(
    ("last", "step", "named"),
    [
        (79, 7.5, [*range(0, 80, 5), 79]),
        (80, 7.5, list(range(0, 81, 5))),
        (63, 4.5, [*range(0, 60, 5), 63]),
        (29, 20.0, None),
    ],
)
def test_the_last_layer_is_named_where_not_all_are(
    last: int, step: float, named: list[int] | None
) -> None:
    ticks = matrix._ticks(range(last + 1), step, 11)
    assert ticks == (alt.Undefined if named is None else named)


@pytest.mark.parametrize(("depths", "numbers"), [(10, True), (20, False)])
def test_numbers_stand_in_cells_that_hold_them(depths: int, numbers: bool) -> None:
    known = {"prompt": range(depths), "depth": [n / depths for n in range(depths)]}
    run = made_run(models=("one",), prompts=depths, layers=(0,), heads=2, measures=("entropy",))
    run = replace(run, prompts=pl.DataFrame({**known, "length": [100] * depths}))
    layers = draw(run, "needle-map", measure="entropy").spec["concat"][0]["layer"]
    assert ("text" in {layer["mark"]["type"] for layer in layers}) is numbers


def test_models_are_compared_in_the_base_however_conditions_are_listed() -> None:
    run = made_run(models=("one", "two"), conditions={"base": 0, "slashes": 9})
    figure = draw(run, "effect-heads", conditions=["slashes", "base"])
    assert re.search("two minus one, condition.* base", figure.caption)
