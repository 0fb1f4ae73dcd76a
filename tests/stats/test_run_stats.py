"""From a model to verdicts: a small run, measured for real."""

import json
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from attnscope.errors import AttnscopeWarning, InputError
from attnscope.experiment.execute import run as carry_out
from attnscope.figures.verdict_cache import VerdictCache
from attnscope.recipes import RECIPES, built_in_claims
from attnscope.run.store import Run, open_run
from attnscope.spec.experiment import make_experiment
from attnscope.stats.resampling import ResamplingUnits
from attnscope.stats.run_stats import (
    compare_run,
    compare_runs,
    judge_run,
    sensitivity_of_run,
)
from attnscope.stats.sensitivity import robustness
from attnscope.stats.verdicts import WRITTEN
from made_models import save_model
from made_runs import made_run
from support_errors import raises


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder: Path = tmp_path_factory.mktemp("run")
    experiment = make_experiment(
        name="fillers",
        models={"qwen": save_model(folder / "model", layers=3)},
        prompts={"source": "math", "count": 12},
        conditions={
            "base": {},
            "slashes": {"insert": {"kind": "repeat", "unit": "/", "count": 20}, "by": "ids"},
            "sentence": {"insert": {"kind": "sentence", "count": 20}, "by": "ids"},
        },
        measures=[
            "mass",
            "lambda",
            "uniform_slope",
            "spikes",
            "uniformity",
            "value_similarity",
            "affine",
            "affine_heads",
            "profile",
        ],
    )
    mine = replace(RECIPES["filler-profile"].claims[0], name="mine")
    carry_out(experiment, folder / "out", claims=[mine])
    return open_run(folder / "out")


def test_every_claim_about_fillers_has_a_verdict(run: Run) -> None:
    verdicts = {verdict.claim: verdict for verdict in judge_run(run, built_in_claims())}
    assert set(verdicts) == {claim.name for claim in built_in_claims()}
    for name, verdict in verdicts.items():
        if not {"lambda_ratio", "uniformity", "affine_r2", "affine_heads_r2"} & {
            measure
            for claim in built_in_claims()
            if claim.name == name
            for measure in claim.measures
        }:
            assert verdict.verdict == "not measured"
        else:
            assert verdict.verdict != "not measured", verdict.reason
            assert verdict.model == "qwen"
            assert "n = 12 prompts" in verdict.reason


def test_claims_about_activations_are_judged_on_the_tokens_that_both_have(tmp_path: Path) -> None:
    """The question's tokens; digits and the like against words, within a prompt."""
    experiment = make_experiment(
        name="activations",
        models={"qwen": save_model(tmp_path / "model", layers=1)},
        prompts={"source": "math", "count": 8},
        conditions={"base": {}, "slashes": {"insert": {"kind": "repeat", "unit": "/", "count": 9}}},
        keys=["question"],
        measures=["activations", "class_near_zero"],
    )
    carry_out(experiment, tmp_path / "out")
    run = open_run(tmp_path / "out")
    names = ("livelier-activations", "digits-near-zero")
    claims = [claim for claim in built_in_claims() if claim.name in names]
    lively, digits = judge_run(run, claims)
    assert [result.n for result in lively.results] == [8] * 4
    values = run.values.filter(pl.col("measure") == "class_near_zero", condition="base").collect()
    sides = [values.filter(item=name)["value"].mean() for name in ("word", "digit")]
    assert digits.results[0].before == pytest.approx(sides[0])
    assert digits.results[0].estimate == pytest.approx(sides[1] / sides[0])


def test_every_condition_is_compared_with_the_base(run: Run) -> None:
    made = compare_run(run)
    assert made.select("a", "b").unique(maintain_order=True).rows() == [
        ("base", "slashes"),
        ("base", "sentence"),
    ]
    assert made["head"].null_count() == made.height  # combined, as the experiment says
    assert compare_run(run, combine="each").height == 4 * made.height
    swapped = compare_run(run, pair=("slashes", "sentence"))
    assert "lambda" in swapped["measure"].to_list()  # both have it
    assert "lambda" not in made["measure"].to_list()
    with raises(InputError, "unknown-model-or-condition", value="other"):
        compare_run(run, pair=("qwen", "other"))


def test_all_pairs_are_of_what_is_compared() -> None:
    made = made_run(measures=["mass"], classes=("hash", "star", "word"), prompts=6)
    table = compare_run(made, over="item", pair="all", combine="mean")
    pairs = table.select("a", "b").unique(maintain_order=True).rows()
    assert {frozenset(pair) for pair in pairs} == {
        frozenset(pair) for pair in combinations(("hash", "star", "word"), 2)
    }
    for over, known in (("condition", ["base"]), ("keys", ["all"])):
        with raises(InputError, "nothing-to-compare", over=over, known=known):
            compare_run(made, over=over, pair="all")


def test_prompts_with_one_text_are_not_split_over_clusters() -> None:
    metadata = pl.DataFrame({"prompt": [0, 1, 2], "id": ["a", "b", "c"], "repeat_of": [0, 1, 0]})
    with raises(InputError, "clusters-not-nested", outer="id"):
        ResamplingUnits(metadata, "id").labels([0, 1, 2])


def test_kinds_of_filler_are_choices(run: Run) -> None:
    claim = next(claim for claim in built_in_claims() if claim.name == "affine")
    made = sensitivity_of_run(run, claim)
    written = made.filter(numbers="as written")
    assert written.select("kind", "count", "position").rows() == [
        ("repeat", 20, "between"),
        ("sentence", 20, "between"),
    ]
    assert robustness(made)["choices"].to_list() == [6]


@pytest.mark.slow
def test_every_claim_with_a_choice_has_a_line(run: Run) -> None:
    lines = VerdictCache(run).robustness()
    assert {"mine", "fall", "affine"} <= set(lines["claim"])
    choices = dict(lines.select("claim", "choices").rows())
    assert (choices["affine"], choices["mine"]) == (6, 30)  # two fillers, five spikes, numbers
    assert (lines["same_verdict"] >= lines["places"]).all()
    whole = lines.filter(pl.col("same_verdict") == pl.col("verdicts"))
    assert (whole["survives"] == whole["places"]).all()


def test_claims_are_frozen_with_the_run(run: Run) -> None:
    first = RECIPES["filler-profile"].claims[0]
    names = {"mine": first, "later": first, "fall": first}
    claims = [replace(claim, name=name) for name, claim in names.items()]
    stated = [verdict.written for verdict in judge_run(run, claims)]
    assert stated == [WRITTEN[0], WRITTEN[2], WRITTEN[0]]
    (verdict,) = judge_run(run, [first], strata="level")
    assert verdict.written == f"{WRITTEN[0]}; the units (level) were chosen afterwards"


def test_claims_are_written_down_before_anything_is_measured(tmp_path: Path) -> None:
    """And stay as they were, whatever claims the run is continued with."""
    first = RECIPES["filler-profile"].claims[0]
    asked = make_experiment(
        name="frozen",
        models={"qwen": save_model(tmp_path / "model", layers=1)},
        prompts={"source": "math", "count": 1},
        measures=["mass"],
    )

    def nothing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("nothing is measured")

    with pytest.raises(RuntimeError):
        carry_out(asked, tmp_path / "out", claims=[first], executor=nothing)
    written = json.loads((tmp_path / "out" / "environment.json").read_text())["claims"]
    assert written[first.name] == first.text
    assert not list((tmp_path / "out").rglob("*.parquet"))
    changed = replace(first, lines=first.lines[:1])
    with pytest.warns(AttnscopeWarning):
        carry_out(asked, tmp_path / "out", claims=[changed])
    (verdict,) = judge_run(open_run(tmp_path / "out"), [changed])
    assert verdict.written == WRITTEN[1]


def test_runs_are_compared_with_one_another(run: Run, tmp_path: Path) -> None:
    again = open_run(shutil.copytree(run.path, tmp_path / "again"))
    made = compare_runs([run, again])
    assert made.select("a", "b").unique().rows() == [("out/qwen", "again/qwen")]
    assert (made["difference"] == 0).all()
    assert made["paired"].all()
    assert set(made["condition"]) == {"base", "slashes", "sentence"}
    with raises(InputError, "unsupported-over"):
        compare_runs([run, run], over="condition")


def test_runs_of_one_prompt_file_are_paired(run: Run, tmp_path: Path) -> None:
    """Each run has its own copy of the file; the content identifies the prompts, not the path."""
    lines = [json.dumps({"question": f"What is {n} plus {n}?"}) + "\n" for n in range(8)]
    made = []
    for folder, some in (("one", lines), ("two", lines), ("three", lines[::-1])):
        (tmp_path / f"{folder}.jsonl").write_text("".join(some))
        prompts = {"source": "file", "path": str(tmp_path / f"{folder}.jsonl")}
        asked = run.experiment.with_keys(
            prompts=prompts, conditions={"base": {}}, measures=["mass"]
        )
        carry_out(asked, tmp_path / folder)
        made.append(open_run(tmp_path / folder))
    assert compare_runs(made[:2])["paired"].all()
    assert not compare_runs(made[::2])["paired"].any()


def test_runs_of_other_prompts_keep_what_is_known_of_them(run: Run, tmp_path: Path) -> None:
    """Two runs of other prompts, each asked twice: twelve prompts are six units on either side."""
    asked = run.experiment.with_keys(
        prompts={"source": "math", "count": 6, "seed": 1}, repeats=2, measures=["mass"]
    )
    carry_out(asked, tmp_path / "other")
    other = open_run(tmp_path / "other")
    made = compare_runs([run, other])
    assert not made["paired"].any()
    assert set(made["units"]) == {6}
    assert set(made["n"]) == {12}
    assert compare_runs([run, other], cluster="level")["units"].max() == 5


def test_facts_of_the_prompts_are_units(run: Run) -> None:
    assert compare_run(run, strata="level")["units"].max() > 0
    with raises(InputError, "unknown-metadata-column", value="topic"):
        compare_run(run, cluster="topic")
