"""The papers' recipes on a tiny model: they run, are drawn, and come to a number."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import attnscope
from attnscope.experiment.execute import run
from attnscope.experiment.plan import make_plan
from attnscope.figures import draw
from attnscope.measures.registry import COLUMNS
from attnscope.recipes import BUNDLED, FIGURES, RECIPES, claims_of
from attnscope.run.schemas import VALUES
from attnscope.stats.headline import auroc, headlines, important_heads
from attnscope.stats.on_run import judge_run
from attnscope.stats.verdicts import judge
from made_models import save_model

PAPERS = [name for name in RECIPES if name not in BUNDLED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("name", ["sinks", "induction"])  # the others are long texts
def test_a_recipe_runs_and_comes_to_a_number(name: str, folder: str, tmp_path: Path) -> None:
    asked = RECIPES[name](models={"tiny": folder}, prompts=2)
    run(asked, tmp_path / name, claims=claims_of(name))
    opened = attnscope.open_run(tmp_path / name)
    assert opened.complete
    numbers = headlines(opened)
    assert numbers
    assert all(np.isfinite(one.value) and one.n <= 2 for one in numbers)
    for figure, options in FIGURES[name]:
        assert draw(opened, figure, **options).data.height > 0
    verdicts = judge_run(opened, claims_of(name))
    assert verdicts
    assert {v.verdict for v in verdicts} <= {"undetermined", "contradicted"}  # of two prompts


@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_can_be_planned(name: str, folder: str) -> None:
    asked = RECIPES[name](models={"tiny": folder}, prompts=1, beyond_positions=True)
    assert make_plan(asked).size == len(asked.conditions)
    assert set(FIGURES[name][0][1].values()) <= set(COLUMNS)


def _noise(measure: str, middle: float, **columns: str) -> pl.DataFrame:
    """Values of 24 prompts, 4 layers and 6 heads about a number."""
    draws = np.random.default_rng(0)
    rows = [
        {
            **dict.fromkeys(VALUES.names()),
            **{"model": "m", "queries": "all", "keys": "all", "condition": "base"},
            **columns,
            **{"prompt": prompt, "layer": layer, "head": head, "measure": measure},
            **{"value": middle * float(np.exp(0.2 * draws.normal())), "uniform": 0.1},
        }
        for prompt in range(24)
        for layer in range(4)
        for head in range(6)
    ]
    return pl.DataFrame(rows, schema=VALUES)


CALM = {
    "sinks": [_noise("first_token", 0.29, condition="text")],
    "sinks-random": [_noise("first_token", 0.29, condition="random")],
    "induction": [_noise("induction", 0.29)],
    "lookback": [_noise("lookback_per_token", 0.5)],
    "needle": [_noise("retrieval", 0.095, keys="answer")],
    "drift": [
        _noise("mass", 0.1, classes="whole", item="token", queries=f"region:turn:{n}:assistant")
        for n in (1, 8)
    ],
    "position": [
        _noise("mass", 0.1, classes="whole", item="token", keys=f"document:{n}") for n in (1, 5, 10)
    ],
    "injection": [
        _noise("mass", 0.1, classes="whole", item="token", condition=name)
        for name in ("harmless-1", "ignore-1")
    ],
}


@pytest.mark.parametrize("name", CALM)
def test_noise_supports_no_claim(name: str) -> None:
    (claim,) = (c for recipe in PAPERS for c in claims_of(recipe) if c.name == name)
    verdicts = judge([claim], pl.concat(CALM[name]), resamples=500)
    assert [v.verdict for v in verdicts] != []
    assert all(v.verdict in ("undetermined", "contradicted") for v in verdicts), verdicts


def test_every_claim_has_its_noise() -> None:
    assert {c.name for recipe in PAPERS for c in claims_of(recipe)} == set(CALM)


def test_auroc_is_the_chance_of_the_larger_score() -> None:
    assert auroc(np.array([3.0, 4.0]), np.array([1.0, 2.0])) == 1
    assert auroc(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == 0.5
    clean, attacked = np.ones((8, 3)), np.ones((8, 3))
    attacked[:, 1] = 0.2
    assert important_heads(clean, attacked).tolist() == [False, True, False]
