"""A run keeps the claims it was begun with, and every reader judges them."""

import html
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

from attnscope.cli import app
from attnscope.errors import AttnscopeWarning, InputError
from attnscope.experiment.execute import run as carry_out
from attnscope.figures import draw
from attnscope.recipes import RECIPES, built_in_claims
from attnscope.report import build
from attnscope.run.merge import merge
from attnscope.run.store import open_run
from attnscope.spec.claims import load_claims, make_claims
from attnscope.spec.experiment import make_experiment
from attnscope.stats.run_stats import judge_run
from attnscope.stats.verdicts import WRITTEN
from made_models import save_model
from made_runs import MadeRun, made_run, write_run

OWN, ABSENT, OTHER = make_claims(
    {"mine": "entropy > 0.1", "absent": "renyi2 > 0.1", "other": "entropy > 0.2"}, "test"
)


def small(**options: Any) -> MadeRun:
    given: dict[str, Any] = {"models": ("m",), "prompts": 8, "layers": (0,), "heads": 2}
    return made_run(**{**given, "measures": ("entropy", "first_token"), **options})


def test_a_run_keeps_its_claims_and_their_file_is_checked(tmp_path: Path) -> None:
    folder = write_run(replace(small(), claims=(OWN, ABSENT)), tmp_path / "run")
    assert open_run(folder).claims == (OWN, ABSENT)
    (folder / "claims.yaml").write_text((folder / "claims.yaml").read_text().replace("0.1", "9"))
    with pytest.raises(InputError):
        open_run(folder)


def test_a_run_without_claims_has_none(tmp_path: Path) -> None:
    folder = write_run(small(), tmp_path / "run")
    assert open_run(folder).claims == ()
    assert not (folder / "claims.yaml").exists()


def test_own_claims_are_judged_by_default_and_come_first(tmp_path: Path) -> None:
    run = replace(small(models=("a", "b"), measures=("mass", "entropy")), claims=(OWN, ABSENT))
    verdicts = judge_run(open_run(write_run(run, tmp_path / "run")))
    names = list(dict.fromkeys(verdict.claim for verdict in verdicts))
    assert names == ["mine", "absent"]
    own = [verdict for verdict in verdicts if verdict.claim == "mine"]
    assert {verdict.verdict for verdict in own} == {"holds"}
    assert {verdict.written for verdict in own} == {WRITTEN[0]}
    built_ins = {claim.name for claim in built_in_claims()}
    others = {v.verdict for v in verdicts if v.claim in built_ins}
    assert "not measured" not in others


def test_the_comparison_that_is_asked_for_stands_before_the_claims(tmp_path: Path) -> None:
    many = make_claims({f"claim {i}": f"entropy > 0.{i}" for i in range(1, 40)}, "test")
    run = replace(small(models=("a", "b")), claims=many)
    folder = str(write_run(run, tmp_path / "run"))
    plain, asked = (
        CliRunner().invoke(app, ["compare", folder, *options]).stdout.splitlines()
        for options in ([], ["--measure", "entropy"])
    )
    assert len(plain) == len(asked) == 40
    assert plain[1].startswith("claim 1: ")
    assert not any(line.startswith("comparison") for line in plain)
    assert asked[1].startswith("comparison")
    assert any(line.startswith("claim 1: ") for line in asked)


def test_the_table_of_a_number_of_heads_has_its_heading_and_names_the_models(
    tmp_path: Path,
) -> None:
    claims = make_claims({"some": "entropy > 0.1 in at least 2 heads"}, "test")
    run = replace(small(models=("one", "two")), claims=claims)
    folder = str(write_run(run, tmp_path / "run"))
    lines = CliRunner().invoke(app, ["compare", folder, "--full"]).stdout.splitlines()
    heading = lines.index("some: entropy is above 0.1 in at least 2 heads.")  # of no model alone
    assert "heads beyond" in lines[heading + 1]
    assert [line.split()[0] for line in lines[heading + 2 : heading + 4]] == ["one", "two"]
    for model in ("one", "two"):
        assert any(f"some ({model})" in line for line in lines if line.startswith("! "))


def test_long_tables_get_fewer_rows_so_that_40_lines_have_the_notes(tmp_path: Path) -> None:
    lines = {f"claim {i}": f"entropy > 0.{i} in each layer" for i in range(1, 4)}
    run = small(models=("a", "b"), layers=range(9), measures=("entropy",))
    run = replace(run, claims=make_claims({**lines, "few": "entropy > 0 in at least 99 heads"}, ""))
    folder = str(write_run(run, tmp_path / "run"))
    text = CliRunner().invoke(app, ["compare", folder]).stdout.splitlines()
    assert len(text) <= 40
    assert any(line.strip().startswith("… ") for line in text[:-1])
    assert len([line for line in text if line.startswith("! few: ")]) == 1  # for both models
    full = CliRunner().invoke(app, ["compare", folder, "--full"]).stdout.splitlines()
    assert sum("layer" in line.split()[:2] for line in full) >= 3 * 2 * 9


def test_every_pair_of_three_models_is_compared_by_default(tmp_path: Path) -> None:
    folder = str(write_run(small(models=("a", "b", "c"), measures=("entropy",)), tmp_path / "run"))
    done = CliRunner().invoke(app, ["compare", folder, "--json"])
    rows = json.loads(done.stdout)["comparison"]
    assert {(row["a"], row["b"]) for row in rows} == {("a", "b"), ("a", "c"), ("b", "c")}


def test_the_left_side_of_a_line_is_printed_under_left(tmp_path: Path) -> None:
    claims = make_claims({"sides": "entropy[model=b] > first_token[model=a]"}, "test")
    run = replace(small(models=("a", "b")), claims=claims)
    folder = write_run(run, tmp_path / "run")
    lines = CliRunner().invoke(app, ["compare", str(folder), "--full"]).stdout.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("sides: entropy"))
    shown = dict(zip(lines[at + 1].split()[:2], lines[at + 2].split()[:2], strict=True))
    values = open_run(folder).values.filter(pl.col("condition") == "base").collect()
    for side, model, measure in (("left", "b", "entropy"), ("right", "a", "first_token")):
        mean = values.filter(model=model, measure=measure)["value"].mean()
        assert float(shown[side]) == pytest.approx(mean, rel=0.1)


def test_a_number_stands_alone_and_one_side_needs_no_shared_options(tmp_path: Path) -> None:
    own = make_claims(
        {
            "value": "entropy[queries=all] > 0.1",
            "parts": [
                "entropy[queries=all, model=b] > 0.9 * entropy[queries=all, model=a]",
                "entropy[queries=all, model=b] > 0.1",
            ],
        },
        "test",
    )
    run = replace(small(models=("a", "b"), measures=("entropy",)), claims=own)
    folder = str(write_run(run, tmp_path / "run"))
    text = CliRunner().invoke(app, ["compare", folder, "--full"]).stdout
    assert re.search(r"^ +value +95 % interval +needed", text, re.MULTILINE)
    assert re.search(r"^  entropy\[model=b\] > 0.9 \* entropy\[model=a\] ", text, re.MULTILINE)
    assert re.search(r"^  entropy > 0.1 ", text, re.MULTILINE)


@pytest.mark.parametrize("options", [["--head", "0"], ["--over", "condition"], ["--layer", "0"]])
def test_rows_cannot_be_chosen_where_nothing_is_compared(
    tmp_path: Path, options: list[str]
) -> None:
    folder = str(write_run(small(), tmp_path / "run"))
    result = CliRunner().invoke(app, ["compare", folder, *options])
    assert result.exception.code == "nothing-to-compare"


def test_compare_prints_why_a_claim_has_no_numbers(tmp_path: Path) -> None:
    folder = write_run(replace(small(), claims=(OWN, ABSENT)), tmp_path / "run")
    lines = CliRunner().invoke(app, ["compare", str(folder)]).stdout.splitlines()
    (absent,) = [line for line in lines if line.startswith("absent: ")]
    assert absent.startswith("absent: not measured: 'renyi2' was not measured; add 'renyi2' to")


def test_report_compare_and_figures_judge_own_claims(tmp_path: Path) -> None:
    folder = write_run(replace(small(), claims=(OWN, ABSENT)), tmp_path / "run")
    run = open_run(folder)
    page = build(run)
    assert "entropy is above 0.1." in page
    described = draw(run, "depth").description
    assert "entropy is above 0.1." in described
    answer = CliRunner().invoke(app, ["compare", str(folder), "--json"])
    assert answer.exit_code == 0, answer.output
    found = {v["claim"]: v["verdict"] for v in json.loads(answer.output)["verdicts"]}
    assert found == {"mine": "holds", "absent": "not measured"}


def test_an_own_claim_can_be_judged_under_choices(tmp_path: Path) -> None:
    run = replace(small(conditions={"base": 0, "slashes": 9}), claims=(OWN,))
    folder = write_run(run, tmp_path / "run")
    answer = CliRunner().invoke(app, ["compare", str(folder), "--sensitivity", "mine", "--json"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.output)["sensitivity"]
    assert draw(open_run(folder), "sensitivity").data.height == 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), layers=1)


def question(model: str) -> Any:
    return make_experiment(
        name="small",
        models={"m": model},
        prompts={"source": "math", "count": 6},
        measures=["entropy"],
    )


def test_claims_are_stored_when_a_run_begins_and_not_changed_later(
    model: str, tmp_path: Path
) -> None:
    carry_out(question(model), tmp_path / "run", claims=[OWN])
    assert load_claims(tmp_path / "run" / "claims.yaml") == (OWN,)
    carry_out(question(model), tmp_path / "run")  # continued without the option
    assert open_run(tmp_path / "run").claims == (OWN,)
    other = replace(OTHER, name="mine")
    with pytest.warns(AttnscopeWarning):
        carry_out(question(model), tmp_path / "run", claims=[other])
    run = open_run(tmp_path / "run")
    assert run.claims == (OWN,)
    assert run.environment["claims"]["mine"] == OWN.text


def test_prompts_that_were_measured_before_are_labelled(model: str, tmp_path: Path) -> None:
    for name in ("first", "second"):
        carry_out(question(model), tmp_path / name, claims=[OWN])
    labels = [
        judge_run(open_run(tmp_path / name), [OWN])[0].written for name in ("first", "second")
    ]
    assert labels[0] == WRITTEN[0]
    assert labels[1] is not None
    assert "first" in labels[1].removeprefix(WRITTEN[0])


def test_claims_are_merged_with_their_parts(model: str, tmp_path: Path) -> None:
    carry_out(question(model), tmp_path / "part", claims=[OWN])
    merge([tmp_path / "part"], tmp_path / "whole")
    assert open_run(tmp_path / "whole").claims == (OWN,)


def test_the_report_of_a_recipe_has_the_verdicts_that_reproduce_prints(
    model: str, tmp_path: Path
) -> None:
    asked = RECIPES["sinks"](models={"m": model}, prompts=6, beyond_positions=True)
    carry_out(asked, tmp_path / "run", claims=RECIPES["sinks"].claims)
    run = open_run(tmp_path / "run")
    assert len(judge_run(run)) == 2
    page = html.unescape(re.sub(r"<[^>]*>", " ", build(run)))
    for verdict in judge_run(run):
        assert verdict.claim in ("sinks", "sinks-random")
        assert verdict.statement in page
        assert verdict.reason in page


def test_prompts_that_an_earlier_run_measured_are_named(model: str, tmp_path: Path) -> None:
    for number, name in enumerate(("first", "second", "later")):
        carry_out(question(model), tmp_path / name, claims=[OWN])
        for file in (tmp_path / name / "cells").glob("*.json"):
            os.utime(file, (number, number))
    carry_out(question(model).with_keys(prompts={"source": "math", "seed": 1}), tmp_path / "seed")
    larger = {"source": "math", "count": 7}
    carry_out(question(model).with_keys(prompts=larger), tmp_path / "larger", claims=[OWN])

    def written(name: str) -> str:
        (verdict,) = judge_run(open_run(tmp_path / name), [OWN])
        assert verdict.written is not None
        return verdict.written

    assert written("first") == WRITTEN[0]
    assert "(first)" in written("second")
    assert "(first, later, second)" in written("larger")
    fresh = judge_run(open_run(tmp_path / "seed"), built_in_claims())
    assert not [v for v in fresh if v.written and "first" in v.written]


def test_holds_with_nothing_decided_says_so(tmp_path: Path) -> None:
    run = small(models=("a", "b"), prompts=3, measures=("entropy",))  # too few for a test
    folder = str(write_run(run, tmp_path / "run"))
    lines = CliRunner().invoke(app, ["compare", folder, "--holds"]).stdout.splitlines()
    assert any(line.startswith("comparison: ") for line in lines)


def test_claims_are_judged_although_their_measure_cannot_be_compared(tmp_path: Path) -> None:
    claims = make_claims({"mine": "lambda > 0.1"}, "test")
    made = small(conditions={"base": 0, "filler": 9}, measures=("lambda",))
    bare, own = (
        str(write_run(replace(made, claims=some), tmp_path / name))
        for name, some in (("bare", ()), ("own", claims))
    )
    invoke = CliRunner().invoke
    done = invoke(app, ["compare", own])
    assert done.exit_code == 0, done.output
    assert "mine: " in done.stdout
    assert "no comparison: " in done.stderr
    for refused in (["compare", bare], ["compare", own, "--over", "condition"]):
        assert invoke(app, refused).exception is not None
