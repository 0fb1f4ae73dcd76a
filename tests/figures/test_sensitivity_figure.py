"""The sensitivity figure: a row per choice, the numbers of the table, choices that overturn."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from attnscope.errors import InputError
from attnscope.figures import draw, save
from attnscope.recipes import built_in_claims
from attnscope.spec.claims import make_claims
from attnscope.stats.sensitivity import CHOICES, sensitivity
from made_runs import MadeRun, made_run
from made_values import masses
from reading_back import plain, rows_of, section
from support_errors import raises

NAMED = {claim.name: claim for claim in built_in_claims()}
SIDE = "mass[class=hash+star, model={}]"
(CHARACTERS,) = make_claims(
    {"characters": f"{SIDE.format('b')} >= 1.05 * {SIDE.format('a')} in each layer"}, "test"
)


def choices_run(*, models: tuple[str, ...] = ("base", "tuned"), layers: int = 2) -> MadeRun:
    """The tuned model attends more with all queries and less with the last, for either keys."""

    def value(queries: str, keys: str) -> Any:
        way = 1 if queries == "all" else -1

        def of(model: str, prompt: int, condition: str, layer: int, head: int, item: str) -> float:
            noise = (3 * prompt + layer + 2 * head + len(item) + len(keys)) % 7
            return 0.3 + 0.05 * way * (model == "tuned") + 0.001 * noise * (1 + (model == "tuned"))

        return of

    tables = [
        masses(value(queries, keys), models=models, layers=layers, queries=queries, keys=keys)
        for queries in ("all", "last")
        for keys in ("all", "not-first")
    ]
    run = made_run(models=models, prompts=12, layers=(0,), heads=1, conditions={"none": 0})
    experiment = run.experiment.with_keys(queries=["all", "last"], keys=["all", "not-first"])
    return replace(run, values=pl.concat(tables).lazy(), experiment=experiment)


@pytest.fixture(scope="module")
def run() -> MadeRun:
    return choices_run()


def test_the_numbers_are_those_of_the_table(run: MadeRun) -> None:
    figure = draw(run, "sensitivity", claim=CHARACTERS)
    table = sensitivity(CHARACTERS, run.values, experiment=run.experiment)
    assert figure.data.height == table.filter(numbers="as written").height == 2 * 2 * 4 * 2
    on = ["queries", "keys", "normalise", "layer"]
    table = table.filter(numbers="as written")
    both = figure.data.join(table, on=on, suffix="_of_table", validate="1:1")
    assert both.height == table.height
    for name in ("difference", "low", "high"):
        shown, expected = (both[n].fill_null(-1).to_list() for n in (name, f"{name}_of_table"))
        assert shown == pytest.approx(expected, rel=1e-5)
    for name in ("verdict", "n", "reference"):
        assert both[name].to_list() == both[f"{name}_of_table"].to_list()


def test_rows_are_named_by_what_varies_and_columns_by_the_normalisation(run: MadeRun) -> None:
    data = draw(run, "sensitivity", claim=CHARACTERS).data
    assert data["choice"].unique(maintain_order=True).to_list() == [
        "all · all",
        "all · not-first",
        "last · all",
        "last · not-first",
    ]
    assert data["panel"].unique(maintain_order=True).to_list() == ["layer 0", "layer 1"]
    assert data["quantity"].unique(maintain_order=True).to_list() == [
        "mass",
        "per-token",
        "share",
        "lift",
    ]
    own = data.filter("reference")
    assert own["choice"].unique().to_list() == ["all · all"]
    assert own["quantity"].unique().to_list() == ["mass"]
    assert own["changed"].unique().to_list() == ["nothing"]


def test_the_description_counts_and_names_what_overturns(run: MadeRun) -> None:
    figure = draw(run, "sensitivity", claim=CHARACTERS)
    same = int(figure.data["same_verdict"].sum())
    assert 0 < same < 32
    for text in (figure.caption, plain(section(figure.description, "Overview")[0])):
        assert f"{same} of 32 verdicts (16 choices)" in text
        assert "0 of 2 layers" in text
    notes = [plain(line) for line in section(figure.description, "Notes")]
    assert [note.partition(":")[0] for note in notes] == ["- layer 0", "- layer 1"]
    for layer, note in enumerate(notes):
        of_layer = figure.data.filter(layer=layer)
        agree = int(of_layer["same_verdict"].sum())
        assert f"holds; {agree} of 16 choices" in note
        assert "queries last" in note
    assert str(32 - same) in section(figure.description, "Differences")[0]


def test_a_verdict_is_a_colour_and_a_shape(run: MadeRun) -> None:
    spec = str(draw(run, "sensitivity", claim=CHARACTERS).spec)
    assert "'shape'" in spec
    assert "'circle', 'cross'" in spec


@pytest.mark.slow
def test_lines_are_at_what_the_claim_needs_and_at_no_difference(run: MadeRun) -> None:
    (value,) = make_claims({"value": "mass[class=hash] > 0.2 in each layer"}, "test")
    for claim, dashed, solid in ((CHARACTERS, 1.05, [1.0]), (value, 0.2, [])):
        text = str(draw(run, "sensitivity", claim=claim).spec)
        drawn = dict.fromkeys(re.findall(r"'strokeDash': \[(\d), \d\].*?'datum': ([\d.]+)", text))
        assert {float(at) for dash, at in drawn if dash == "4"} == {dashed}
        assert [float(at) for dash, at in drawn if dash == "1"] == solid


@pytest.mark.slow
def test_the_rows_can_be_chosen(run: MadeRun) -> None:
    figure = draw(run, "sensitivity", claim=CHARACTERS, layers=[1], queries="last")
    assert figure.data["layer"].unique().to_list() == [1]
    assert figure.data["queries"].unique().to_list() == ["last"]
    assert "queries: last" in figure.caption
    whole = draw(run, "sensitivity", claim=CHARACTERS).data
    kept = whole.filter(layer=1, queries="last")  # corrected over all layers all the same
    assert figure.data["p"].to_list() == kept["p"].to_list()
    turned = draw(run, "sensitivity", claim=CHARACTERS, models=["tuned", "base"])
    back = (1 / whole["difference"]).to_list()  # a ratio
    assert turned.data["difference"].to_list() == pytest.approx(back, rel=1e-4)
    for wrong, code in (
        ({"layers": [7]}, "unknown-layer"),
        ({"queries": "first"}, "unknown-queries"),
        ({"models": ["other"]}, "unknown-model"),
        ({"items": ["hash"]}, "conflicting-options"),
    ):
        with raises(InputError, code):
            draw(run, "sensitivity", claim=CHARACTERS, **wrong)


def test_normalisations_alone_make_layers_the_rows() -> None:
    run = choices_run()
    one = replace(
        run, values=run.values.filter(pl.col("queries") == "all", pl.col("keys") == "all")
    )
    data = draw(one, "sensitivity", claim=CHARACTERS).data
    assert data["panel"].unique().to_list() == ["all"]
    assert data["choice"].unique(maintain_order=True).to_list() == ["layer 0", "layer 1"]
    assert data.height == 2 * 4


@pytest.mark.slow
def test_too_many_layers_are_thinned_out_and_counted() -> None:
    run = choices_run(layers=30)
    figure = draw(run, "sensitivity", claim=CHARACTERS)
    layers = figure.data["layer"].unique().sort().to_list()
    assert len(layers) == 18  # 4 rows each
    assert layers[0] == 0
    assert layers[-1] == 29
    assert "12 further layers" in figure.caption
    every = draw(run, "sensitivity", claim=CHARACTERS, layers=list(range(30)))
    assert every.data["layer"].n_unique() == 30


def test_bad_input() -> None:
    run = choices_run()
    for name in ("map", 5):
        with raises(InputError, "unknown-claim", value=name, known=list(NAMED)):
            draw(run, "sensitivity", claim=name)
    with pytest.raises(InputError):  # the claim is about a measure that the run does not have
        draw(run, "sensitivity", claim="affine")
    alone = choices_run(models=("alone",))
    with pytest.raises(InputError):  # the claim compares two models
        draw(alone, "sensitivity", claim="maps")
    single = made_run(
        models=("one",),
        conditions={"base": 0, "slashes": 9, "sentence": 9},
        measures=("uniformity",),
        layers=(0,),
    )
    with raises(InputError, "one-choice-only", claim="uniform-filler"):
        draw(single, "sensitivity", claim="uniform-filler")
    with raises(InputError, "one-choice-only"):
        draw(single, "sensitivity")
    with raises(InputError, "missing-claim", part=1):
        draw(run, "sensitivity", part=1)


def test_a_line_that_counts_heads_shows_their_number() -> None:
    run = made_run(
        models=("one",),
        conditions={"base": 0, "slashes": 9, "more": 18, "sentence": 9},
        measures=("uniformity",),
        layers=(0,),
    )
    first = draw(run, "sensitivity", claim="uniform-filler")
    assert first.data["choice"].to_list() == [
        "slashes (9 × repeat, between)",
        "more (18 × repeat, between)",
    ]
    counted = draw(run, "sensitivity", claim="uniform-filler", part=1)
    assert counted.data["scale"].unique().to_list() == ["heads"]
    assert counted.data["difference"].max() <= 4
    # The verdict is that of the whole claim, whichever line is shown.
    assert counted.data["verdict"].to_list() == first.data["verdict"].to_list()


def test_claims_of_ones_own(run: MadeRun, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    line = CHARACTERS.lines[0].text
    file.write_text(f"claims:\n  characters: {line}\n")
    by_file = draw(run, "sensitivity", claims=str(file), claim="characters")
    assert "characters" in by_file.title
    assert draw(run, "sensitivity", claim=CHARACTERS).data.equals(by_file.data)


def test_few_prompts_decide_nothing_and_have_their_intervals(run: MadeRun) -> None:
    few = draw(run, "sensitivity", claim=CHARACTERS, prompts=[0, 1, 2])
    assert few.data["verdict"].unique().to_list() == ["cannot tell"]
    assert few.data["n"].unique().to_list() == [3]
    assert few.data["p"].null_count() == few.data.height
    assert "32 of 32 verdicts (16 choices)" in few.caption


@pytest.mark.slow
def test_all_formats(run: MadeRun, tmp_path: Path) -> None:
    figure = draw(run, "sensitivity", claim=CHARACTERS)
    paths = save(figure, tmp_path)
    assert [path.suffix for path in paths] == [".png", ".svg", ".pdf", ".html", ".csv", ".md"]
    assert all(path.stat().st_size > 500 for path in paths)
    assert set(CHOICES) - {"classes", "spikes"} <= set(rows_of(figure.spec).columns)
