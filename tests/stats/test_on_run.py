"""From a model to verdicts: a small run, measured for real."""

from pathlib import Path

import polars as pl
import pytest

from attnscope.errors import InputError
from attnscope.experiment.execute import run as carry_out
from attnscope.question.spec import made
from attnscope.run.store import Run, open_run
from attnscope.stats.claims import built_in
from attnscope.stats.on_run import compare_run, judge_run, sensitivity_of_run, survival_of_run
from attnscope.stats.sensitivity import survival
from made_models import save_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder: Path = tmp_path_factory.mktemp("run")
    experiment = made(
        name="fillers",
        models={"qwen": save_model(folder / "model", layers=3)},
        prompts={"source": "math", "count": 8},
        conditions={
            "base": {},
            "slashes": {"insert": {"kind": "repeat", "unit": "/", "count": 20}, "by": "ids"},
            "sentence": {"insert": {"kind": "sentence", "count": 20}, "by": "ids"},
        },
        measures=[
            "mass",
            "lambda",
            "spikes",
            "uniformity",
            "value_similarity",
            "affine",
            "profile",
        ],
    )
    carry_out(experiment, folder / "out")
    return open_run(folder / "out")


def test_every_claim_about_fillers_has_a_verdict(run: Run) -> None:
    verdicts = {verdict.claim: verdict for verdict in judge_run(run, resamples=500)}
    assert set(verdicts) == {claim.name for claim in built_in()}
    for name, verdict in verdicts.items():
        if name.startswith("map"):
            assert verdict.verdict == "not measured"
        else:
            assert verdict.verdict != "not measured", verdict.reason
            assert verdict.model == "qwen"
            assert "n 8" in verdict.reason


def test_every_condition_is_compared_with_the_base(run: Run) -> None:
    made = compare_run(run, resamples=500)
    assert made.select("a", "b").unique(maintain_order=True).rows() == [
        ("base", "slashes"),
        ("base", "sentence"),
    ]
    assert made["head"].null_count() == made.height  # combined, as the experiment says
    assert compare_run(run, combine="each", resamples=500).height == 4 * made.height
    swapped = compare_run(run, pair=("slashes", "sentence"), resamples=500)
    assert "lambda" in swapped["measure"].to_list()  # both have it
    assert "lambda" not in made["measure"].to_list()
    with pytest.raises(InputError, match="unknown model 'other'; known: qwen"):
        compare_run(run, pair=("qwen", "other"))


def test_kinds_of_filler_are_choices(run: Run) -> None:
    claim = next(claim for claim in built_in() if claim.name == "affine")
    made = sensitivity_of_run(run, claim, resamples=500)
    assert made.select("kind", "count", "position").rows() == [
        ("repeat", 20, "between"),
        ("sentence", 20, "between"),
    ]
    assert survival(made)["choices"].to_list() == [2]


def test_every_claim_with_a_choice_has_a_line(run: Run) -> None:
    lines = survival_of_run(run, resamples=500)
    # `uniform-filler` compares the only repeat with the only sentence; the rest have both kinds.
    assert lines["claim"].to_list() == [
        "fall",
        "one-factor",
        "one-factor-fit",
        "affine",
        "affine-first-layer-only",
    ]
    assert lines["choices"].to_list() == [2] * 5
    assert lines["places"].to_list() == [1] * 5
    assert (lines["same_verdict"] >= lines["places"]).all()
    whole = lines.filter(pl.col("same_verdict") == pl.col("verdicts"))
    assert (whole["survives"] == whole["places"]).all()
