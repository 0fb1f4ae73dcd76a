"""`attnscope reproduce` and the report of its run have the same numbers, each computed once."""

import html
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attnscope.cli import app
from attnscope.errors import InputError
from attnscope.experiment.execute import run
from attnscope.figures import drawing
from attnscope.recipes import RECIPES
from attnscope.report import build
from attnscope.report.published import published_statistics
from attnscope.run.store import open_run
from attnscope.spec.claims import Claim
from attnscope.spec.experiment import make_experiment
from attnscope.stats import run_stats
from made_models import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), layers=1)


def reproduce(model: str, out: Path) -> str:
    options = ["--models", f"m={model}", "--prompts", "6", "--beyond-positions", "--out", str(out)]
    result = CliRunner().invoke(app, ["reproduce", "sinks", *options], env={"COLUMNS": "1000"})
    assert result.exit_code == 0, result.output
    return result.output


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


def test_the_report_has_the_statistics_and_verdicts_that_are_printed(
    model: str, tmp_path: Path
) -> None:
    printed = reproduce(model, tmp_path)
    opened = open_run(tmp_path / "sinks")
    assert [claim.name for claim in opened.claims] == ["sinks", "sinks-random"]
    page = text_of((tmp_path / "sinks" / "report.html").read_text(encoding="utf-8"))
    statistics, verdicts = published_statistics(opened), run_stats.judge_run(opened)
    assert len(statistics) == len(opened.experiment.conditions)
    assert len(verdicts) == 2
    for statistic in statistics:
        assert str(statistic) in printed
        assert statistic.what in page
        assert statistic.shown in page
    for verdict in verdicts:
        assert str(verdict) in printed
        assert verdict.reason in page
    assert text_of(build(opened)).count(statistics[0].what) == 1
    compared = CliRunner().invoke(app, ["compare", str(tmp_path / "sinks"), "--full"]).output
    as_json = CliRunner().invoke(app, ["compare", str(tmp_path / "sinks"), "--json"]).output
    data = json.loads(as_json, parse_constant=pytest.fail)
    for statistic, row in zip(statistics, data["statistics"], strict=True):
        assert f"{statistic.what}  " in compared
        assert (row["what"], row["value"], row["n"]) == (statistic.what, statistic.value, 6)


def test_claims_are_judged_once_and_figures_drawn_once(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    judge, draw = run_stats.judge, drawing.draw

    def counted_judge(claims: Iterable[Claim], *args: Any, **settings: Any) -> Any:
        claims = list(claims)
        counts.update(f"claim {claim.name}" for claim in claims)
        return judge(claims, *args, **settings)

    def counted_draw(run: Any, declared: Any, **options: Any) -> Any:
        counts[f"figure {declared.name}"] += 1
        return draw(run, declared, **options)

    monkeypatch.setattr(run_stats, "judge", counted_judge)
    monkeypatch.setattr(drawing, "draw", counted_draw)
    reproduce(model, tmp_path)
    assert counts["claim sinks"] == counts["figure head-map"] == 1
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("measures", [["entropy"], ["mass"]])
def test_a_run_named_as_a_recipe_with_other_keys_has_a_report(
    measures: list[str], model: str, tmp_path: Path
) -> None:
    prompts = {"source": "math", "count": 2}
    run(
        make_experiment(name="injection", models={"m": model}, prompts=prompts, measures=measures),
        tmp_path,
    )
    opened = open_run(tmp_path)
    with pytest.raises(InputError):
        published_statistics(opened)
    assert "injection" in build(opened)


WITHOUT_CLAIMS = {"detectors"}
"""It compares two groups of prompts, which no claim does."""


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_named_as_its_experiment_and_its_claims_can_be_read(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.description.endswith(".")
    assert recipe.claims or name in WITHOUT_CLAIMS
    assert recipe(prompts=1).name == recipe.name == name
