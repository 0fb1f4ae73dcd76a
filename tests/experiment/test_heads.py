"""`attnscope heads`: the scores of three recipes joined, and types against stated thresholds."""

import re
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

import attnscope
from attnscope.cli import app
from attnscope.experiment.execute import run
from attnscope.figures.head_types import HEAD_TYPES, NONE, classify_heads, summary
from attnscope.figures.registry import draw_table
from attnscope.recipes.heads import SCORES, head_experiments, head_scores
from attnscope.run.store import Run

LAYERS, HEADS = 6, 12  # of zoo:math-qwen2


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("heads")
    experiments = head_experiments("zoo:math-qwen2", prompts=6, seed=1)
    for name, experiment in experiments.items():
        run(experiment, folder / name)
    return {name: attnscope.open_run(folder / name) for name in experiments}


def test_scores_are_the_values_of_the_recipes(runs: dict[str, Run]) -> None:
    scores = head_scores(runs)
    for score, (recipe, measure) in SCORES.items():
        of = scores.filter(pl.col("score") == score).drop("score", "item")
        if score != "retrieval":
            place = pl.col("layer", "head").cast(pl.Int64)
            values = runs[recipe].values.filter(pl.col("measure") == measure)
            wanted = values.select("prompt", place, "value").collect()
            assert of.equals(wanted), score
        assert of.height == 6 * LAYERS * HEADS
    by_class = scores.filter(pl.col("score") == "class_lift", pl.col("item") == "hash")
    assert by_class["value"].null_count() == by_class.height == 6 * LAYERS * HEADS  # no hash
    assert "retrieval" not in head_scores({k: v for k, v in runs.items() if k != "needle"})["score"]


def test_a_needle_that_was_not_found_has_no_score(
    runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {prompt: prompt != 2 for prompt in range(6)}
    monkeypatch.setattr("attnscope.recipes.heads.found_needles", lambda run, model: found)
    retrieval = head_scores(runs).filter(pl.col("score") == "retrieval")
    lost = retrieval.filter(pl.col("value").is_null())
    assert lost["prompt"].unique().to_list() == [2]
    assert lost.height == LAYERS * HEADS


def scored(**of: list[float]) -> pl.DataFrame:
    rows = [
        {"score": score, "item": None, "prompt": n, "layer": 0, "head": 0, "value": value}
        for score, found in of.items()
        for n, value in enumerate(found)
    ]
    return pl.DataFrame(rows, schema_overrides={"item": pl.String})


def test_a_head_is_of_a_kind_where_the_whole_interval_is_above() -> None:
    sure, unsure = [0.5, 0.52, 0.48, 0.51, 0.49, 0.5], [0.9, 0.0, 0.9, 0.1, 0.8, 0.0]
    table = classify_heads(scored(sink=sure, induction=unsure, retrieval=[0.5] * 6))
    row = table.row(0, named=True)
    assert row["kind"] == "retrieval"
    assert row["kinds"] == "retrieval, sink"
    # All six prompts have 0.5: the others, down to 0 and up to 1, are at most this share.
    others = 1 - 0.025 ** (1 / 6)
    assert row["retrieval_low"] == pytest.approx(0.5 - 0.5 * others)
    assert row["retrieval_high"] == pytest.approx(0.5 + 0.5 * others)
    assert row["induction"] > 0.3 > row["induction_low"]
    found = {one["kind"]: one for one in summary(table).to_dicts()}
    assert (found["induction"]["above"], found["induction"]["certain"]) == (1, 0)
    assert found["local"]["heads"] == 0
    few = classify_heads(scored(sink=sure[:5])).row(0, named=True)
    assert few["kind"] == NONE
    assert few["sink_low"] is None


def test_a_class_counts_where_it_is_preferred() -> None:
    rows = []
    for n in range(6):
        for name, mass, lift in (("word", 0.6, 1.1), ("digit", 0.4 + n / 100, 5.0)):
            for score, value in (("class_mass", mass), ("class_lift", lift)):
                rows.append(
                    {
                        "score": score,
                        "item": name,
                        "prompt": n,
                        "layer": 1,
                        "head": 2,
                        "value": value,
                    }
                )
    row = classify_heads(pl.DataFrame(rows)).row(0, named=True)
    assert (row["kind"], row["class"]) == ("class-specific", "digit")
    assert row["class_mass"] == pytest.approx(0.425)


def test_the_command_writes_a_table_and_a_picture(tmp_path: Path) -> None:
    asked = ["heads", "zoo:math-qwen2", "--prompts", "6", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, asked, env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert all(kind.name in done.output for kind in HEAD_TYPES)
    assert "needles" in done.output
    assert "A[i, i - 1]" in done.output
    table = pl.read_csv(tmp_path / "out" / "heads.csv")
    assert table.height == LAYERS * HEADS
    assert attnscope.open_run(tmp_path / "out" / "needle").complete
    assert set(table["kind"]) <= {NONE, *(kind.name for kind in HEAD_TYPES)}
    assert (tmp_path / "out" / "heads.png").read_bytes().startswith(b"\x89PNG")
    assert "Head types of math-qwen2" in (tmp_path / "out" / "heads.svg").read_text()


def test_every_layer_has_its_number_in_the_picture() -> None:
    places = [{"layer": layer, "head": head} for layer in range(24) for head in range(14)]
    table = pl.DataFrame(places).with_columns(pl.lit("sink").alias("kind"))
    drawn = draw_table("heads", table, model="m", prompts=8).svg
    labels = re.findall(r'<text text-anchor="end"[^>]*>(\d+)</text>', drawn)
    assert sorted(map(int, labels)) == list(range(24))
