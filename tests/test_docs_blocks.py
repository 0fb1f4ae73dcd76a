"""The Python blocks of README.md and of these pages run, from top to bottom in one folder."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attnscope.cli import app
from attnscope.experiment.execute import run
from attnscope.recipes import RECIPES, recipe_table
from attnscope.run.schemas import TABLES
from attnscope.spec.experiment import make_experiment

ROOT = Path(__file__).parents[1]


def blocks_of(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)
    assert len(blocks) == text.count("```python") > 0
    return blocks


def executed(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in blocks_of(page):
        exec(compile(block, page, "exec"), names)
    return names


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs and files that the pages use."""
    made_here = tmp_path_factory.mktemp("docs")
    run(RECIPES["token-types"](prompts=6), made_here / "runs" / "token-types")
    slashes = make_experiment(
        name="slashes",
        models={"math": "zoo:math-qwen2"},
        prompts={"source": "math", "count": 1, "level": 1},
        conditions={"base": {}, "slashes": {"insert": {"count": 5}}},
    )
    run(slashes, made_here / "runs" / "slashes")
    line = json.dumps({"problem": "What is 2 + 3?"}) + "\n"
    (made_here / "math500.jsonl").write_text(line, encoding="utf-8")
    return made_here


PAGES = ["README.md"] + [
    f"docs/{name}.md"
    for name in (
        "activations",
        "experiments",
        "figures",
        "interventions",
        "pictures",
        "statistics",
        "tokens-and-prompts",
        "training",
        "zoo",
    )
]


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert executed(page)


def test_help_lists_what_there_is() -> None:
    def words_of(command: str) -> set[str]:
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        return set(re.findall(r"[\w-]+", shown.output))

    assert {*TABLES, "cells", "prompts"} <= words_of("query")
    assert set(RECIPES) <= words_of("reproduce")


def test_the_page_of_recipes_has_the_table_of_their_declarations() -> None:
    page = (ROOT / "docs" / "recipes" / "README.md").read_text(encoding="utf-8")
    assert recipe_table() in page
