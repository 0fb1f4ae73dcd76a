"""Token types: stacked bars, and the same numbers in every format."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from attnscope.errors import InputError
from attnscope.figures import Style, draw, figure_named, save
from attnscope.figures.export import csv
from attnscope.run.tables import combine
from made_runs import made_run
from reading_back import rows_of, table_of
from support_errors import raises

MAPS = ["hash", "star", "whitespace"]
"""The classes of the published figure."""


def test_a_bar_is_the_mean_over_heads_and_prompts() -> None:
    run = made_run(prompts=5)
    frame = draw(run, "token-types", items=MAPS).data
    for (model, layer, name), part in frame.group_by("model", "layer", "class"):
        names = MAPS if name == "total" else [name]
        of_it = run.values.filter(
            pl.col("measure") == "mass",
            pl.col("model") == model,
            pl.col("layer") == layer,
            pl.col("item").is_in(names),
        ).collect()
        by_hand = of_it["value"].sum() / 5 / 4
        assert part["value"].item() == pytest.approx(by_hand, rel=1e-5)
        assert part["n"].item() == 5


def test_the_stack_goes_whitespace_star_hash() -> None:
    frame = draw(made_run(), "token-types", items=MAPS).data
    for _, bar in frame.group_by("model", "layer"):
        at = {row["class"]: row for row in bar.to_dicts()}
        assert at["whitespace"]["bottom"] == 0
        assert at["star"]["bottom"] == pytest.approx(at["whitespace"]["top"], rel=1e-5)
        assert at["hash"]["bottom"] == pytest.approx(at["star"]["top"], rel=1e-5)
        assert at["hash"]["top"] == pytest.approx(at["total"]["value"], rel=1e-5)
        assert at["total"]["low"] <= at["total"]["value"] <= at["total"]["high"]


def test_models_stand_in_the_order_of_the_run() -> None:
    figure = draw(made_run(models=("zebra", "ant")), "token-types")
    assert figure.data["model"].unique(maintain_order=True).to_list() == ["zebra", "ant"]


def test_colours_axes_and_legend_are_the_published_ones() -> None:
    text = json.dumps(draw(made_run(), "token-types", items=MAPS).spec)
    assert '"domain": ["hash", "star", "whitespace"]' in text
    assert '"range": ["#d62728", "#1f77b4", "#9a9a9a"]' in text
    assert '"orient": "top"' in text


def test_share_adds_up_to_one() -> None:
    frame = draw(made_run(), "token-types", normalise="share").data
    totals = frame.filter(pl.col("class") == "total")["value"]
    assert totals.to_list() == pytest.approx([1.0] * len(totals))
    assert draw(made_run(), "token-types", normalize="share").data.equals(frame)


def test_heads_can_be_summed_or_chosen() -> None:
    run = made_run()
    mean = draw(run, "token-types").data
    whole = draw(run, "token-types", combine="sum").data
    assert whole["value"].to_list() == pytest.approx((mean["value"] * 4).to_list(), rel=1e-5)
    one = draw(run, "token-types", heads=[2])
    by_hand = (
        combine(run.values.filter(pl.col("head") == 2, pl.col("measure") == "mass"), "mean")
        .filter(pl.col("item") == "star", pl.col("layer") == 0, pl.col("model") == "spatial-base")
        .get_column("value")
        .mean()
    )
    row = one.data.filter(
        pl.col("class") == "star", pl.col("layer") == 0, pl.col("model") == "spatial-base"
    )
    assert row["value"].item() == pytest.approx(by_hand, rel=1e-5)
    assert "head 2" in one.caption


def test_the_caption_names_models_layers_heads_queries_keys_and_n() -> None:
    caption = draw(made_run(), "token-types").caption
    for term in ("spatial-phys", "layers 0–3", "all heads", "queries: all", "keys: all", "n = 12"):
        assert term in caption
    assert "tiny" in caption
    assert "tiny" not in draw(made_run(bundled=False), "token-types").caption


def test_one_prompt_has_no_interval() -> None:
    figure = draw(made_run(prompts=1), "token-types")
    assert figure.data["low"].null_count() == figure.data.height
    assert "95 %" not in figure.caption
    assert "whisker_low" not in figure.data.columns


def test_one_model_has_no_differences() -> None:
    figure = draw(made_run(models=("alone",)), "token-types")
    assert "| minus |" not in figure.description


def test_values_that_are_not_numbers_are_left_out_and_counted() -> None:
    run = made_run(prompts=4)
    broken = run.values.with_columns(
        pl.when((pl.col("prompt") == 0) & (pl.col("layer") == 0) & (pl.col("measure") == "mass"))
        .then(float("nan"))
        .otherwise(pl.col("value"))
        .alias("value")
    )
    figure = draw(type(run)(**(vars(run) | {"values": broken})), "token-types")
    assert figure.data.filter(pl.col("layer") == 0)["n"].unique().to_list() == [3]
    assert figure.data.filter(pl.col("layer") == 1)["n"].unique().to_list() == [4]
    assert "undefined" in figure.caption
    every = run.values.with_columns(pl.lit(float("nan")).alias("value"))
    with raises(InputError, "all-undefined", measures=["mass"]):
        draw(type(run)(**(vars(run) | {"values": every})), "token-types")


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        ({"layers": [9]}, "unknown-layer", {"value": 9, "known": [0, 1, 2, 3]}),
        ({"models": ["gpt"]}, "unknown-model", {"known": ["spatial-phys", "spatial-base"]}),
        ({"items": ["hsh"]}, "unknown-class", {"value": "hsh"}),
        ({"queries": "last"}, "unknown-queries", {"value": "last", "known": ["all"]}),
        ({"layers": []}, "empty-choice", {"option": "layers"}),
        ({"whiskers": "all"}, "unknown-whiskers", {"known": ["none", "total", "classes"]}),
        ({"normalise": "lifts"}, "unknown-normalise", {"value": "lifts"}),
        ({"wiskers": "total"}, "unknown-option", {"value": "wiskers"}),
        ({"theme": "neon"}, "unknown-theme", {"value": "neon", "known": ["published", "safe"]}),
        ({"theme": 3}, "unknown-theme", {"value": 3, "known": ["published", "safe"]}),
        ({"width": 3}, "bad-size", {"option": "width", "value": 3}),
        ({"width": "wide"}, "bad-size", {"option": "width", "value": "wide"}),
        ({"uniform": 1}, "unknown-uniform", {"value": 1, "known": [False, True]}),
    ],
)
def test_bad_options_are_named_with_the_good_ones(
    options: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    with raises(InputError, code, **values):
        draw(made_run(), "token-types", **options)


def test_a_run_without_mass_is_an_error() -> None:
    with raises(InputError, "not-measured", missing=["mass"]):
        draw(made_run(measures=("entropy",)), "token-types")


def test_the_chart_function_takes_a_plain_frame() -> None:
    frame = pl.DataFrame(
        {"model": ["m"], "layer": [0], "class": ["hash"], "bottom": [0.0], "top": [0.4]}
    )
    spec = figure_named("token-types").chart(frame, Style(), whiskers="none").to_dict()
    assert next(iter(spec["datasets"].values()))[0]["top"] == 0.4


@pytest.mark.parametrize("options", [{}, {"uniform": True}, {"prompts": [0]}])
def test_csv_description_and_specification_have_equal_numbers(
    options: dict[str, Any],
) -> None:
    figure = draw(made_run(), "token-types", **options)
    read = pl.read_csv(io.StringIO(csv(figure)), schema=figure.data.schema)
    assert_frame_equal(read, figure.data, check_exact=True)
    embedded = rows_of(figure.spec).select(figure.data.columns).cast(dict(figure.data.schema))
    assert_frame_equal(embedded, figure.data, check_exact=True)
    head, body = table_of(figure.description)
    assert head == figure.data.columns
    for cells, row in zip(body, figure.data.iter_rows(), strict=True):
        for cell, value in zip(cells, row, strict=True):
            if value is None:
                assert cell == "—"
            elif isinstance(value, float):
                assert float(cell) == value
            else:
                assert cell == str(value)


def test_six_files_and_nothing_else(tmp_path: Path) -> None:
    figure = draw(made_run(), "token-types")
    paths = save(figure, tmp_path / "figures")
    names = {p.name for p in (tmp_path / "figures").iterdir()}
    assert names == {f"token-types.{end}" for end in ("png", "svg", "pdf", "html", "csv", "md")}
    assert {p.name for p in paths} == names
    content = {p.suffix: p.read_bytes() for p in paths}
    assert content[".png"].startswith(b"\x89PNG")
    assert figure.alt.encode() in content[".png"]
    assert content[".pdf"].startswith(b"%PDF")
    assert b"<svg" in content[".svg"]
    assert content[".md"].decode().startswith(f"## {figure.title}\n\n![{figure.title}")
    with raises(InputError, "unknown-format", value="gif"):
        save(figure, tmp_path, ["gif"])


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(InputError, "cannot-write"):
        save(draw(made_run(prompts=1), "token-types"), tmp_path / "file" / "figures", ["csv"])


def test_of_many_layers_eight_are_shown_unless_layers_are_chosen() -> None:
    run = made_run(models=("one",), layers=tuple(range(20)), heads=1, measures=("mass",))
    shown = draw(run, "token-types")
    assert shown.data["layer"].n_unique() == 8
    assert "20" in shown.caption
    assert draw(run, "token-types", layers=list(range(20))).data["layer"].n_unique() == 20
