"""What holds for every figure: equal numbers everywhere, honest captions, errors that help."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import cache
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from attnscope.errors import InputError
from attnscope.figures import FIGURES, SAFE, Drawing, Style, draw, drawable, figure_named
from attnscope.figures.drawing import draw as draw_declared
from attnscope.figures.export import csv
from attnscope.figures.registry import TABLE_FIGURES, draw_table, table
from attnscope.figures.shapes.dots import Dots
from attnscope.figures.shapes.lines import Lines
from attnscope.figures.shapes.shape import Shape
from attnscope.figures.text_format import inline
from attnscope.spec.claims import make_claims
from attnscope.spec.experiment import Experiment, make_experiment
from made_runs import MadeRun, made_run
from reading_back import plain, rows_of, table_of
from support_errors import raises

MEASURES = tuple(
    dict.fromkeys(
        [
            *(measure for name in FIGURES for measure in figure_named(name).measures),
            *("query_mass", "lambda_ratio", "uniformity"),
            *("near_zero", "activation_l1", "activation_l2"),
        ]
    )
)
"""What figures declare, and what some read besides."""
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name == "sensitivity" else name
    for name in FIGURES
]
"""The sensitivity of all claims takes seconds."""
STEPS = ("step 0", "step 100")
FOR_HEADS = {"model": "m", "prompts": 8}
ODD = ("The", ' "sky"', " is", " #", " *", " ", "<script>alert(1)</script>", "\n", "|", " 😀")


@cache
def rich_run(prompts: int = 7, models: tuple[str, ...] = ("first", "second")) -> MadeRun:
    run = made_run(
        models=models,
        prompts=prompts,
        layers=(0, 1),
        heads=3,
        conditions={"base": 0, "slashes": 9, "more": 18, "sentence": 9},
        measures=MEASURES,
        profile_heads=(0, 2),
        texts=ODD,
        length=24,
        keys=("all", "document:1", "document:2"),
        picture=True,
    )
    lines = {"stars": "mass[class=star] > mass[class=hash]"}
    return replace(run, claims=make_claims(lines, "test"))


def run_for(name: str, prompts: int = 7) -> MadeRun:
    """A run that has the figure: that of a training has steps as models."""
    return rich_run(prompts, STEPS) if name == "over-steps" else rich_run(prompts)


@cache
def drawn(name: str) -> Drawing:
    return draw(run_for(name), name)


@pytest.mark.parametrize("name", NAMES)
def test_csv_description_and_specification_have_equal_numbers(name: str) -> None:
    figure = drawn(name)
    data = figure.data
    assert data.height > 0
    read = pl.read_csv(io.StringIO(csv(figure)), schema=data.schema)
    assert_frame_equal(read, data, check_exact=True)
    embedded = rows_of(figure.spec).select(data.columns).cast(dict(data.schema))
    assert_frame_equal(embedded, data, check_exact=True, check_row_order=False)
    head, body = table_of(figure.description)
    assert head == data.columns
    for cells, row in zip(body, data.iter_rows(), strict=True):
        for cell, value in zip(cells, row, strict=True):
            if value is None:
                assert cell == "—"
            elif isinstance(value, float):
                assert float(cell) == value
            else:
                assert cell == (plain(inline(value)) if isinstance(value, str) else str(value))


@pytest.mark.parametrize("name", NAMES)
def test_no_number_is_changed_by_the_chart(name: str) -> None:
    def transforms(node: Any) -> list[dict[str, Any]]:
        if isinstance(node, dict):
            found = list(node.get("transform", []))
            return found + [t for v in node.values() for t in transforms(v)]
        return [t for v in node for t in transforms(v)] if isinstance(node, list) else []

    figure = drawn(name)
    for spec in (figure.spec, figure.interactive):
        bare = {k: v for k, v in spec.items() if k != "datasets"}
        assert all(set(t) == {"filter"} for t in transforms(bare))
        assert '"aggregate"' not in str(bare).replace("'", '"')


@pytest.mark.parametrize("name", ["filler-profile", "filler-vs-sentence"])
def test_no_two_panels_share_a_name(name: str) -> None:
    """Vega-Lite draws the data of one of them in both."""
    names: list[str] = []

    def collect(part: Any) -> None:
        if isinstance(part, dict):
            if "mark" in part and "name" in part:
                names.append(part["name"])
            for key, value in part.items():
                if key != "datasets":
                    collect(value)
        elif isinstance(part, list):
            for value in part:
                collect(value)

    collect(drawn(name).interactive)
    assert len(set(names)) == len(names) >= 4


@pytest.mark.parametrize("name", NAMES)
def test_captions_state_what_is_shown(name: str) -> None:
    caption = drawn(name).caption
    model = next(iter(run_for(name).experiment.models))
    for term in (model, "layer", "head", "queries: all", "n = ", "tiny"):
        assert term in caption, term


@pytest.mark.parametrize("name", NAMES)
def test_alternative_text_is_in_the_chart(name: str) -> None:
    figure = drawn(name)
    assert figure.spec["description"] == figure.alt
    assert figure.alt.startswith(figure.title)
    assert len(figure.alt) < 2_500


@pytest.mark.parametrize("name", NAMES)
def test_one_prompt_invents_no_interval(name: str) -> None:
    figure = draw(run_for(name, 1), name)
    for column in ("low", "high", "p", "q"):
        if column in figure.data.columns:
            assert figure.data[column].null_count() == figure.data.height
    assert not re.search(r"\bq = ", figure.description)


@pytest.mark.parametrize("name", NAMES)
def test_themes_dark_and_a_given_title_change_looks_only(name: str) -> None:
    plain_figure = drawn(name)
    mine = replace(SAFE, name="mine", font="Inter")
    other = draw(run_for(name), name, theme=mine, dark=True, title="Mine")
    assert_frame_equal(other.data, plain_figure.data)
    assert other.spec["config"]["font"] == "Inter"
    assert other.spec["config"]["background"] != plain_figure.spec["config"]["background"]
    assert other.title == "Mine"
    assert other.spec["title"]["text"] == ["Mine"]


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_run_names_the_experiment_that_has_the_numbers(name: str) -> None:
    run = rich_run()
    names = ("values", "positions", "by_query")
    empty = replace(run, **{name: getattr(run, name).limit(0) for name in names})
    with pytest.raises(InputError) as error:
        draw(empty, name)
    assert error.value.code in ("not-measured", "one-choice-only")
    assert figure_named(name).needs in str(error.value)


def test_a_figure_without_its_columns_names_the_recipe_that_has_them() -> None:
    run = made_run(measures=("entropy",))
    drawn, missing = drawable(run)
    names = [figure.name for figure in drawn]
    assert sorted([*names, *missing]) == sorted(FIGURES)
    assert "depth" in names
    for name in ("token-types", "filler-profile", "filler-vs-sentence"):
        assert name in missing[name]
    with raises(InputError, "nothing-to-draw", missing=list(FIGURES)):
        drawable(made_run(measures=()))


@pytest.mark.parametrize("alone", ["first_token", "residual_largest"])
def test_massive_activations_are_drawn_beside_the_sink_only(alone: str) -> None:
    with pytest.raises(InputError) as error:
        draw(made_run(measures=(alone,)), "massive")
    assert error.value.code == "not-measured"


def test_one_model_and_one_condition_have_no_difference() -> None:
    with raises(InputError, "nothing-to-compare", models=["alone"], conditions=["base"]):
        draw(made_run(models=("alone",)), "effect-heads")


def test_filler_of_one_length_has_no_curve() -> None:
    run = made_run(conditions={"base": 0, "slashes": 9}, measures=("lambda",))
    with raises(InputError, "one-length-only", conditions=["slashes"]):
        draw(run, "lambda-length")


def test_a_line_over_lengths_is_one_filler_at_one_place() -> None:
    run = made_run(
        models=("one",),
        conditions={"base": 0, "a": 9, "b": 18, "marks": 9, "end": 9},
        measures=("lambda",),
        layers=(0,),
    )
    places = {
        "base": {},
        "a": {"insert": {"kind": "repeat", "unit": "/", "count": 9}, "position": "between"},
        "b": {"insert": {"kind": "repeat", "unit": "/", "count": 18}, "position": "between"},
        "marks": {"insert": {"kind": "repeat", "unit": "?", "count": 9}, "position": "between"},
        "end": {"insert": {"kind": "repeat", "unit": "/", "count": 9}, "position": "end"},
    }

    def with_places() -> Experiment:
        keys = {"name": "made", "models": ["one"], "prompts": {"source": "spatial"}}
        return make_experiment(**keys, conditions=places)

    asked = replace(run, experiment=with_places())
    figure = draw(asked, "lambda-length")
    assert figure.data["condition"].to_list() == ["a", "b"]
    assert "repeat '/', between" in figure.caption
    assert "marks and end" in figure.caption
    places["more"] = {"insert": {"kind": "repeat", "unit": "?", "count": 18}, "position": "between"}
    more = run.values.filter(pl.col("condition") == "b").with_columns(
        pl.lit("more").alias("condition")
    )
    cells = run.cells.filter(pl.col("condition") == "b").with_columns(
        pl.lit("more").alias("condition")
    )
    two = replace(
        asked,
        values=pl.concat([run.values, more]),
        cells=run.cells.vstack(cells),
        experiment=with_places(),
    )
    panels = draw(two, "lambda-length").data["panel"].unique(maintain_order=True).to_list()
    assert panels == ["one, repeat '/', between", "one, repeat '?', between"]


def test_classes_that_only_other_conditions_have_get_no_panel() -> None:
    run = made_run(models=("one",), conditions={"base": 0, "slashes": 9, "random": 9})
    none = pl.col("item").is_in(["hash", "star"]) & (pl.col("condition") != "random")
    values = run.values.with_columns(
        pl.when(none).then(0.0).otherwise(pl.col("tokens")).alias("tokens")
    )
    figure = draw(replace(run, values=values), "effect-heads")
    assert figure.data["item"].unique(maintain_order=True).to_list() == [
        "whitespace",
        "word",
        "other",
    ]
    assert "hash or star" in figure.caption


def test_classes_that_get_nothing_have_no_column_in_the_flow() -> None:
    run = made_run()
    to_star = (pl.col("measure") == "flow") & (pl.col("target") == "star")
    from_star = (pl.col("measure") == "flow") & (pl.col("item") == "star")
    values = run.values.with_columns(
        pl.when(from_star).then(None).when(to_star).then(0.0).otherwise("value").alias("value")
    )
    figure = draw(replace(run, values=values), "flow")
    assert set(figure.data["to"]) == {"hash", "whitespace", "word", "other"}
    assert set(figure.data["from"]) == {"hash", "whitespace", "word", "other"}
    assert "star" in figure.caption
    assert "star" in set(drawn("flow").data["to"])
    assert "star" not in drawn("flow").caption


def test_classes_that_get_nothing_have_no_line_by_query() -> None:
    run = rich_run()
    zero = pl.when(pl.col("item") == "star").then(0.0).otherwise(pl.col("value")).alias("value")
    changed = replace(run, by_query=run.by_query.with_columns(zero))
    figure = draw(changed, "by-query", measure="query_mass", keys="all")
    assert "star" in set(draw(run, "by-query", measure="query_mass", keys="all").data["series"])
    assert "star" not in set(figure.data["series"])
    chosen = draw(changed, "by-query", measure="query_mass", keys="all", items=["star", "hash"])
    of_star = chosen.data.filter(series="star")
    assert of_star.height > 0
    assert of_star["low"].null_count() == of_star["high"].null_count() == of_star.height


def test_an_unknown_figure_lists_the_known() -> None:
    with raises(InputError, "unknown-figure", value="pie", known=list(FIGURES)):
        draw(rich_run(), "pie")


def test_conditions_can_stand_beside_each_other() -> None:
    figure = draw(rich_run(), "token-types", models="first", conditions=["base", "slashes"])
    assert figure.data["model"].unique(maintain_order=True).to_list() == ["base", "slashes"]
    assert re.search(r"\| slashes \| base \| [-\d.]+", figure.description)


def test_the_heat_map_marks_what_passes_the_correction() -> None:
    data = drawn("effect-heads").data
    assert data["significant"].to_list() == (data["q"] < 0.05).to_list()
    assert 0 < data["significant"].sum() < data.height
    few = draw(rich_run(4), "effect-heads")
    assert few.data["q"].null_count() == few.data.height
    assert few.data["significant"].sum() == 0


def test_lift_is_mass_over_uniform_mass() -> None:
    run = rich_run()
    row = drawn("lift").data.row(0, named=True)
    values = run.values.filter(
        pl.col("measure") == "mass",
        pl.col("condition") == "base",
        *[pl.col(c) == row[c] for c in ("model", "layer")],
        pl.col("item") == row["class"],
    ).collect()
    by_prompt = values.group_by("prompt").agg(pl.col("value").mean() / pl.col("uniform").first())
    assert row["value"] == pytest.approx(by_prompt["value"].mean(), rel=1e-5)


def test_text_keeps_every_token_in_its_order() -> None:
    data = drawn("text").data
    tokens = rich_run().tokens.filter(
        pl.col("model") == "first", pl.col("prompt") == 0, pl.col("condition") == "base"
    )
    assert data["token"].to_list() == tokens.sort("position").collect()["text"].to_list()
    after = data.filter(pl.col("token").shift(1) == "\n")
    assert (after["column"] == 0).all()
    for _, line in data.group_by("line", maintain_order=True):
        assert line["end"].to_list()[:-1] == line["column"].to_list()[1:]


def test_a_notebook_gets_the_chart_and_a_picture() -> None:
    bundle = drawn("depth")._repr_mimebundle_()
    assert bundle["application/vnd.vegalite.v6+json"]["$schema"].startswith("https://vega")
    assert bundle["image/png"].startswith("iVBOR")
    assert drawn("depth").chart.to_dict()["title"] == drawn("depth").spec["title"]


def test_the_caption_names_the_stored_heads_only() -> None:
    run = made_run(heads=8)
    some = replace(run, values=run.values.filter(pl.col("head").is_in([0, 1, 7])))
    assert "heads 0, 1, 7 (of 8)" in draw(some, "token-types").caption
    assert "all heads" in draw(run, "token-types").caption


def test_classes_without_a_token_are_left_out_and_named() -> None:
    run = made_run()
    none = pl.col("item").is_in(["hash", "star"]) & (pl.col("measure") == "mass")
    values = run.values.with_columns(
        pl.when(none).then(0.0).otherwise(pl.col("tokens")).alias("tokens")
    )
    for name in ("token-types", "classes", "lift"):
        figure = draw(replace(run, values=values), name)
        assert "hash or star" in figure.caption
        assert not {"hash", "star"} & set(figure.data["class"])


@pytest.mark.parametrize("name", NAMES)
def test_a_chart_can_be_made_of_a_table_of_ones_own(name: str) -> None:
    data = drawn(name).data
    spec = figure_named(name).chart(data, Style()).to_dict()
    embedded = rows_of(spec).select(data.columns).cast(dict(data.schema))
    assert_frame_equal(embedded, data, check_row_order=False)


@pytest.mark.parametrize("name", ["token-types", "classes", "head-map", "effect-heads"])
def test_no_class_is_left_out_unless_items_are_chosen(name: str) -> None:
    column = {"head-map": "panel", "effect-heads": "item"}.get(name, "class")
    shown = set(drawn(name).data[column]) - {"total"}
    assert shown == {"hash", "star", "whitespace", "word", "other"}
    some = draw(run_for(name), name, items=["star", "hash"]).data[column]
    assert set(some) - {"total"} == {"star", "hash"}


@pytest.mark.parametrize("shape", [Lines(series="model"), Dots(x="layer", series="model")])
def test_a_declaration_without_a_column_of_panels_has_one_panel(shape: Shape) -> None:
    of_depth = figure_named("depth")
    declared = replace(of_depth, measures=["entropy"], by=["model", "layer"], shape=shape)
    figure = draw_declared(rich_run(), declared)
    assert figure.data.columns[:2] == ["model", "layer"]
    assert figure.data.height == 4
    assert figure.svg.startswith("<svg")


def test_lines_with_one_colour_differ_by_their_dashes() -> None:
    (chart,) = drawn("steps").spec["vconcat"]
    spec = chart["concat"][0]["layer"][1]["encoding"]
    both = zip(spec["color"]["scale"]["range"], spec["strokeDash"]["scale"]["range"], strict=True)
    signs = [(colour, tuple(dash)) for colour, dash in both]
    assert len(signs) == len(set(signs)) == 15


def test_a_symbol_at_the_beginning_of_a_title_stays() -> None:
    assert drawn("lambda").title.startswith("λ")


def test_figures_of_tables_have_equal_numbers_in_csv_and_chart() -> None:
    heads = [{"layer": n // 3, "head": n % 3} for n in range(6)]
    effects = [{"problem": 0, "class": "digit", **at, "mass": 0.1, "effect": -0.2} for at in heads]
    score = {"panel": "filler: count", "series": "-", "value": 0.1, "low": 0.0, "high": 0.2}
    scores = [{**score, "setting": name, "score": 0.5, "n": 8, "q": 0.01} for name in "abc"]
    means = [{"model": "m", "value": 0.1, "low": 0.0, "high": 0.2, "n": 12, **at} for at in heads]
    table = pl.DataFrame(means)
    of_layers = table.select(pl.exclude("head")).unique("layer", maintain_order=True)
    named = {"card-classes": "class", "card-depth": "measure", "card-generated": "part"}
    cards = {
        name: of_layers.with_columns(pl.lit("first_token").alias(column))
        for name, column in named.items()
    }
    cards["card-distance"] = table
    made = [
        *(draw_table(name, cards[name]) for name in sorted(cards)),
        draw_table("heads", pl.DataFrame(heads).with_columns(kind=pl.lit("sink")), **FOR_HEADS),
        draw_table("mass-effect", pl.DataFrame(effects), of="m"),
        draw_table("sweep", pl.DataFrame(scores), of="m", baseline=0.4),
    ]
    assert [figure.name for figure in made] == sorted(TABLE_FIGURES)
    for figure in made:
        embedded = rows_of(figure.spec).select(figure.data.columns).cast(dict(figure.data.schema))
        assert_frame_equal(embedded, figure.data, check_row_order=False)
        assert "n = " in figure.caption
        assert figure.data.height in (2, 3, 6, 12)
    with raises(InputError, "not-measured"):
        draw(rich_run(), "sweep")


def test_the_page_of_figures_lists_every_figure_and_option() -> None:
    rows = {row.split("`")[1]: row for row in table().splitlines() if row.startswith("| `")}
    for figure in map(figure_named, FIGURES):
        assert figure.shows in rows[figure.name]
        for name, option in figure.options.items():
            assert f"`{name}`" in rows[figure.name]
            assert option.help in rows[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_has_the_name_it_is_listed_under(name: str) -> None:
    assert figure_named(name).name == name


def test_queries_along_completions_of_a_run_without_completions() -> None:
    with raises(InputError, "not-measured", missing=["query_mass"]):
        draw(rich_run(), "by-query", along="answer")


def test_steps_of_a_training_are_the_axis() -> None:
    run = rich_run(models=("step 0", "step 100", "step 20"))
    figure = draw(run, "over-steps", measure="entropy", layers=[1])
    values = run.values.filter(measure="entropy", condition="base", layer=1).collect()
    assert figure.data["training_step"].to_list() == [0, 20, 100]
    for step, value in figure.data.select("training_step", "value").iter_rows():
        mean = values.filter(model=f"step {step}")["value"].mean()
        assert value == pytest.approx(mean, rel=1e-4)
    with raises(InputError, "no-steps"):
        draw(rich_run(), "over-steps")
    with raises(InputError, "no-steps"):  # two conditions of a step are not one value
        draw(run, "over-steps", conditions=["base", "slashes"])
