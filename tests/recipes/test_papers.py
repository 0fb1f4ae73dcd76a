"""The papers' recipes on a tiny model: they run, are drawn, and come to a number."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

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
from attnscope.spec.prompt_sources import DocumentPrompts, NeedlePrompts
from attnscope.stats.focus import auroc, focus, important_heads, shares
from attnscope.stats.published import published_statistics, sink_share
from attnscope.stats.run_stats import judge_run
from attnscope.stats.verdicts import FROZEN, judge
from made_models import save_model


def loaded(name: str) -> Any:
    """A file of benchmarks/."""
    at = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    found = importlib.util.spec_from_file_location(name, at)
    assert found is not None
    assert found.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


# What a filler does to activations belongs to the recipes of fillers, which have no page here.
PAPERS = [name for name in RECIPES if name not in (*BUNDLED, "filler-activations")]
DOCS = Path(__file__).parents[2] / "docs"
literal = loaded("papers")
nulls = loaded("nulls_recipes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("name", ["sinks", "induction"])  # the others are long texts
def test_a_recipe_runs_and_comes_to_a_number(name: str, folder: str, tmp_path: Path) -> None:
    asked = RECIPES[name](models={"tiny": folder}, prompts=2)
    run(asked, tmp_path / name, claims=claims_of(name))
    opened = attnscope.open_run(tmp_path / name)
    assert opened.complete
    numbers = published_statistics(opened)
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
    for _, options in FIGURES[name]:
        assert options.get("measure", "mass") in COLUMNS


def test_what_a_filler_does_to_activations_is_judged(folder: str, tmp_path: Path) -> None:
    """Claims (6) and (7) of the paper on fillers, on the question's tokens alone."""
    run(RECIPES["filler-activations"](models={"tiny": folder}, prompts=6), tmp_path)
    opened = attnscope.open_run(tmp_path)
    found = {v.claim: v for v in judge_run(opened) if v.verdict != "not measured"}
    assert set(found) == {"livelier-activations", "digits-near-zero"}
    assert all(v.frozen == FROZEN[0] for v in found.values())
    figures = found["livelier-activations"].figures
    assert figures is not None
    assert figures["keys"].unique().to_list() == ["question"]
    assert figures["n"].to_list() == [6] * 4
    classes = found["digits-near-zero"].figures
    assert classes is not None
    assert classes["n"].to_list() == [6] * 3  # digits, operators and conjunctions in every prompt
    for figure, options in FIGURES["filler-activations"]:
        assert draw(opened, figure, **options).data.height > 0


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


def test_heads_are_chosen_far_apart_and_then_less_far() -> None:
    draws = np.random.default_rng(0)
    calm = 1 + 0.1 * draws.normal(size=(40, 4))
    attacked = calm - np.array([2.0, 0.5, 0.0, 0.0])  # by ten spreads of both; by 2.5; not
    assert important_heads(calm, attacked).tolist() == [True, False, False, False]
    assert important_heads(calm, attacked, fewest=2).tolist() == [True, True, False, False]
    assert important_heads(attacked, calm, fewest=4).all()  # the farthest, if none is apart


def test_a_head_that_notices_any_insertion_is_passed_over() -> None:
    """The first head falls with whatever is inserted, the second with attacks alone."""
    draws = np.random.default_rng(0)
    levels = {"clean": (0.9, 0.9), "harmless": (0.2, 0.9), "ignore": (0.2, 0.4)}
    first, second = (
        {k: level + 0.02 * draws.normal(size=(12, 2)) for k, level in levels.items()}
        for _ in range(2)
    )
    numbers = np.arange(6.0)
    published = focus(first, second, calm=["clean"], attack="ignore")
    mended = focus(first, second, calm=["clean", "harmless"], attack="ignore")
    assert (published.heads, mended.heads) == (2, 1)
    assert published.flagged(["harmless"])(numbers) == 1
    assert mended.flagged(["harmless"])(numbers) == 0
    assert mended.flagged(["ignore"])(numbers) == 1
    assert mended.auroc_against("harmless", ["ignore"])(numbers) == 1


def test_a_sink_is_counted_prompt_by_prompt() -> None:
    """As published: a head above 0.3 in one of two prompts counts half, whatever its mean."""
    assert sink_share(np.array([[0.9, 0.2], [0.1, 0.2]])) == 0.25
    assert shares(np.array([0.2, 0.0]), np.array([0.6, 0.0])).tolist() == [0.25, 0.0]


SHORT: dict[str, Any] = {
    "needle": NeedlePrompts(count=1, lengths=(12,)),
    "position": DocumentPrompts(count=1, words=4),
}
"""Shorter texts, where the recipe's own are long for a tokenizer of single bytes."""


@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_is_its_papers_formula_on_dense_attention(
    name: str, folder: str, tmp_path: Path
) -> None:
    asked = RECIPES[name](models={"m": folder}, prompts=1, beyond_positions=True)
    asked = asked.model_copy(update={"prompts": SHORT.get(name, asked.prompts)})
    run(asked, tmp_path / "run")
    opened = attnscope.open_run(tmp_path / "run")
    model, _ = attnscope.load(folder, dtype="float32")
    model.set_attn_implementation("eager")
    found = literal.deviations(name, model, opened)
    assert found
    for what, (off, most) in found.items():
        assert off < 1e-5, what
        # Random weights copy no needle; tests/experiment/test_generated.py has tokens that they do.
        assert most > 0 or name == "needle", what


def test_every_claim_of_a_recipe_has_worlds_of_both_kinds() -> None:
    cases = nulls.cases()
    for claim in (c for recipe in PAPERS for c in claims_of(recipe)):
        assert {case.true for case in cases if case.claim == claim} == {True, False}, claim.name


@pytest.mark.parametrize("name", [*PAPERS, *BUNDLED, "filler-activations"])
def test_a_recipe_has_its_page(name: str) -> None:
    page = (DOCS / "recipes" / f"{name}.md").read_text(encoding="utf-8")
    assert f"attnscope reproduce {name}" in page
    assert "arXiv" in page
    images = re.findall(r'src="\.\./images/([^"]+)"', page)
    assert images
    assert all((DOCS / "images" / image).is_file() for image in images)
    numbers = page.partition("<!-- numbers -->")[2].partition("<!-- end of numbers -->")[0]
    assert re.search(r"^(supported|contradicted|undetermined|not measured): ", numbers, re.M)
    assert f"({name}.md)" in (DOCS / "recipes" / "README.md").read_text(encoding="utf-8")
