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
from attnscope.recipes import BUNDLED, RECIPES
from attnscope.recipes.injection import auroc, focus, important_heads, shares
from attnscope.recipes.sinks import sink_share
from attnscope.report.published import published_statistics
from attnscope.run.schemas import VALUES
from attnscope.spec.prompt_sources import DocumentPrompts, NeedlePrompts
from attnscope.stats.run_stats import judge_run
from attnscope.stats.verdicts import WRITTEN, judge
from made_models import save_model


def loaded(name: str) -> Any:
    """A file of validation/."""
    at = Path(__file__).parents[2] / "validation" / f"{name}.py"
    found = importlib.util.spec_from_file_location(name, at)
    assert found is not None
    assert found.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


# What a filler does to activations belongs to the recipes of fillers, which have no page here.
PAPERS = [name for name in RECIPES if name not in (*BUNDLED, "filler-activations")]
PICTURES = [name for name in RECIPES if RECIPES[name].extra]  # test_picture_recipes.py runs them
DOCS = Path(__file__).parents[2] / "docs"
literal = loaded("papers_dense")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("name", ["sinks", "induction"])  # the others are long texts
def test_a_recipe_runs_and_comes_to_a_number(name: str, folder: str, tmp_path: Path) -> None:
    asked = RECIPES[name](models={"tiny": folder}, prompts=2)
    run(asked, tmp_path / name, claims=RECIPES[name].claims)
    opened = attnscope.open_run(tmp_path / name)
    assert opened.complete
    numbers = published_statistics(opened)
    assert numbers
    assert all(np.isfinite(one.value) and one.n <= 2 for one in numbers)
    for figure, options in RECIPES[name].figures.items():
        assert draw(opened, figure, **options).data.height > 0
    verdicts = judge_run(opened, RECIPES[name].claims)
    assert verdicts
    assert {v.verdict for v in verdicts} == {"cannot tell"}  # of two prompts


@pytest.mark.parametrize("name", [name for name in PAPERS if name not in PICTURES])
def test_a_recipe_can_be_planned(name: str, folder: str) -> None:
    asked = RECIPES[name](models={"tiny": folder}, prompts=1, beyond_positions=True)
    assert make_plan(asked).size == len(asked.conditions)
    for options in RECIPES[name].figures.values():
        assert options.get("measure", "mass") in COLUMNS


def test_what_a_filler_does_to_activations_is_judged(folder: str, tmp_path: Path) -> None:
    """Claims (6) and (7) of the paper on fillers, on the question's tokens alone."""
    run(RECIPES["filler-activations"](models={"tiny": folder}, prompts=6), tmp_path)
    opened = attnscope.open_run(tmp_path)
    found = {v.claim: v for v in judge_run(opened) if v.verdict != "not measured"}
    assert set(found) == {"livelier-activations", "digits-near-zero"}
    assert all(v.written == WRITTEN[0] for v in found.values())
    lively, digits = (found[name] for name in ("livelier-activations", "digits-near-zero"))
    assert {q.keys for line in lively.lines for q in line.quantities} == {"question"}
    assert [result.n for result in lively.results] == [6] * 4
    # Digits, operators and conjunctions in every prompt.
    assert [result.n for result in digits.results] == [6] * 3
    for figure, options in RECIPES["filler-activations"].figures.items():
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


WHOLE = {"classes": "whole", "item": "token"}
CALM = {
    "sinks": [_noise("first_token", 0.29, condition="text")],
    "sinks-random": [_noise("first_token", 0.29, condition="random")],
    "induction": [_noise("induction", 0.29, queries="region:repeat:2")],
    "lookback": [_noise("lookback_per_token", 0.52, queries="predicts:generated")],
    "heavy": [_noise("top_share", 0.59, item="0.2")],
    "receivers": [_noise("receiver_kurtosis", 2.8, keys="solution")],
    "streaming": [_noise("on_rest", 0.49)],
    "alignment": [_noise("alignment", 0.675, queries="predicts:transcript")],
    "massive": [_noise("residual_largest", 97), _noise("residual_ratio", 970)],
    "rerank": [
        _noise("rerank_score", 0.1, keys=key, queries="region:query", condition="no-query")
        for key in ("relevant", "distractor")
    ],
    "needle": [_noise("retrieval", 0.095, keys="answer", queries="predicts:generated")],
    "drift": [
        _noise("mass", 0.1, keys="system", **WHOLE, queries=f"region:turn:{n}:assistant")
        for n in (1, 8)
    ],
    "image-grounding": [
        _noise("box_ratio", 1.45, queries=queries) for queries in ("region:target", "last")
    ],
    "image-pointing": [
        _noise("pointing", 0.48, queries=queries) for queries in ("region:target", "last")
    ],
    "image-tokens": [
        _noise("mass", middle, queries="last", classes="modality", item=item).with_columns(
            tokens=pl.lit(tokens, pl.Float64)
        )
        for item, middle, tokens in (("image", 0.75, 144), ("text", 0.1, 10), ("special", 0.1, 10))
    ],
    "position": [
        _noise("mass", 0.1, queries="last", **WHOLE, keys=f"document:{n}") for n in (1, 5, 10)
    ],
    "injection": [
        _noise("mass", 0.1, keys="system", queries="last", **WHOLE, condition=name)
        for name in ("harmless", "ignore")
    ],
    "injection-control": [
        _noise("mass", middle, keys="system", queries="last", **WHOLE, condition=name)
        for name, middle in (("harmless", 0.1), ("harmless-other", 0.106))
    ],
}


@pytest.mark.parametrize("name", CALM)
def test_noise_supports_no_claim(name: str) -> None:
    (claim,) = (c for recipe in PAPERS for c in RECIPES[recipe].claims if c.name == name)
    texts = pl.DataFrame({"prompt": range(24), "text": [str(n % 8) for n in range(24)]})
    verdicts = judge([claim], pl.concat(CALM[name]), prompts=texts)
    assert [v.verdict for v in verdicts] != []
    assert all(v.verdict not in ("holds", "not measured") for v in verdicts), verdicts


def test_every_claim_has_its_noise() -> None:
    assert {c.name for recipe in PAPERS for c in RECIPES[recipe].claims} == set(CALM)


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
    scores = {k: level + 0.02 * draws.normal(size=(12, 2)) for k, level in levels.items()}
    numbers = np.arange(6.0)
    published = focus(scores, calm=["clean"], attack="ignore")
    mended = focus(scores, calm=["clean", "harmless"], attack="ignore")
    assert (published.heads, mended.heads) == (2, 1)
    assert published.flagged(["harmless"])(numbers) == 1
    assert mended.flagged(["harmless"])(numbers) == 0
    assert mended.flagged(["ignore"])(numbers) == 1
    assert mended.auroc_against("harmless", ["ignore"])(numbers) == 1


def test_a_sink_is_counted_prompt_by_prompt() -> None:
    """As published: a head above 0.3 in one of two prompts counts half, whatever its mean."""
    assert sink_share(np.array([[0.9, 0.2], [0.1, 0.2]])) == 0.25
    assert shares(np.array([0.2, 0.0]), np.array([0.6, 0.0])).tolist() == [0.25, 0.0]


ZERO = ("needle", "streaming: retrieval, predicts:generated", "massive: massive_entries")
"""Random weights copy no needle and have no massive entry; test_generated.py and
test_residual_run.py in tests/experiment have such."""
# The recipe alignment needs a speech model: tests/experiment/test_speech_run.py has its formula.
SHORT: dict[str, Any] = {
    "needle": NeedlePrompts(count=1, lengths=(12,)),
    "streaming": NeedlePrompts(count=1, lengths=(12,)),
    "heavy": DocumentPrompts(count=1, words=4),
    "position": DocumentPrompts(count=1, words=4),
}
"""Shorter texts, where the recipe's own are long for a tokenizer of single bytes."""


@pytest.mark.parametrize("name", [n for n in PAPERS if n not in ("alignment", *PICTURES)])
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
        assert most > 0 or what in ZERO, what


@pytest.mark.parametrize("name", [*PAPERS, *BUNDLED, "filler-activations"])
def test_a_recipe_has_its_page(name: str) -> None:
    page = (DOCS / "recipes" / f"{name}.md").read_text(encoding="utf-8")
    assert f"attnscope reproduce {name}" in page
    assert "arXiv" in page
    images = re.findall(r'src="\.\./images/([^"]+)"', page)
    assert images
    assert all((DOCS / "images" / image).is_file() for image in images)
    numbers = page.partition("<!-- numbers -->")[2].partition("<!-- end of numbers -->")[0]
    assert numbers.count("\n| ") > 2  # the heading, and at least one number
    assert f"({name}.md)" in (DOCS / "recipes" / "README.md").read_text(encoding="utf-8")
