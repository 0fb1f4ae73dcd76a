"""A run keeps the claims it was begun with, and every reader judges them."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attnscope.cli import app
from attnscope.errors import AttnscopeWarning, InputError
from attnscope.experiment.execute import run as carry_out
from attnscope.figures import draw
from attnscope.recipes import RECIPES, claims_of
from attnscope.report import build
from attnscope.run.merge import merge
from attnscope.run.store import open_run
from attnscope.spec.claims import Claim, built_in, digest, load_claims
from attnscope.spec.experiment import make_experiment
from attnscope.stats.published import reproduced_lines
from attnscope.stats.run_stats import judge_run
from attnscope.stats.verdicts import FROZEN
from made_models import save_model
from made_runs import MadeRun, made_run, write_run

OWN = Claim.model_validate(
    {
        "name": "mine",
        "statement": "The entropy of {model} is above 0.1.",
        "quantity": {"measure": "entropy"},
        "comparison": {"threshold": 0.1},
        "direction": "more",
    }
)
ABSENT = OWN.model_copy(
    update={
        "name": "absent",
        "parts": (
            OWN.parts[0].model_copy(
                update={"quantity": OWN.parts[0].quantity.model_copy(update={"measure": "renyi2"})}
            ),
        ),
    }
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
    verdicts = judge_run(open_run(write_run(run, tmp_path / "run")), resamples=200)
    names = list(dict.fromkeys(verdict.claim for verdict in verdicts))
    assert names == ["mine", "absent", "map-characters"]
    own = [verdict for verdict in verdicts if verdict.claim == "mine"]
    assert {verdict.verdict for verdict in own} == {"supported"}
    assert {verdict.frozen for verdict in own} == {FROZEN[0]}
    built_ins = {claim.name for claim in built_in()}
    others = {v.verdict for v in verdicts if v.claim in built_ins}
    assert "not measured" not in others


def test_report_compare_and_figures_judge_own_claims(tmp_path: Path) -> None:
    folder = write_run(replace(small(), claims=(OWN, ABSENT)), tmp_path / "run")
    run = open_run(folder)
    page = build(run)
    assert "The entropy of m is above 0.1." in page
    described = draw(run, "depth").description
    assert "The entropy of m is above 0.1." in described
    answer = CliRunner().invoke(app, ["compare", str(folder), "--json"])
    assert answer.exit_code == 0, answer.output
    found = {v["claim"]: v["verdict"] for v in json.loads(answer.output)["verdicts"]}
    assert found == {"mine": "supported", "absent": "not measured"}


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
    other = OWN.model_copy(update={"statement": "Another."})
    with pytest.warns(AttnscopeWarning):
        carry_out(question(model), tmp_path / "run", claims=[other])
    run = open_run(tmp_path / "run")
    assert run.claims == (OWN,)
    assert run.environment["claims"]["mine"] == digest(OWN)


def test_claims_are_merged_with_their_parts(model: str, tmp_path: Path) -> None:
    carry_out(question(model), tmp_path / "part", claims=[OWN])
    merge([tmp_path / "part"], tmp_path / "whole")
    assert open_run(tmp_path / "whole").claims == (OWN,)


def test_the_report_of_a_recipe_has_the_verdicts_that_reproduce_prints(
    model: str, tmp_path: Path
) -> None:
    asked = RECIPES["sinks"](models={"m": model}, prompts=6, beyond_positions=True)
    carry_out(asked, tmp_path / "run", claims=claims_of("sinks"))
    run = open_run(tmp_path / "run")
    printed = [
        line for line in reproduced_lines(run) if line.startswith(("supp", "contra", "undet"))
    ]
    assert len(printed) == 2
    page = html.unescape(re.sub(r"<[^>]*>", " ", build(run)))
    for verdict in judge_run(run):
        assert verdict.claim in ("sinks", "sinks-random")
        assert verdict.statement in page
        assert verdict.reason in page
