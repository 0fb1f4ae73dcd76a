"""The recipe, reduction and hooks of docs/extending.md run as printed; their numbers are right."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import attnscope
from attnscope.experiment.execute import run as carry_out
from attnscope.figures import draw
from attnscope.run.store import open_run
from attnscope.stats.run_stats import judge_run

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def run(heading: str) -> dict[str, Any]:
    """The names that the block below a heading defines."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)
    assert len(block.splitlines()) < 40
    made: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), made)
    return made


def test_the_recipe_runs_and_is_judged(tmp_path: Path) -> None:
    recipe = run("A recipe")["RECIPE"]
    carry_out(recipe(prompts=6, models=["zoo:spatial-base"]), tmp_path, claims=recipe.claims)
    opened = open_run(tmp_path)
    (statistic,) = recipe.statistics(opened)
    mean = opened.values.collect()["value"].mean()
    assert statistic.of(statistic.table) == pytest.approx(mean, rel=1e-6)
    (verdict,) = judge_run(opened)
    assert verdict.claim == "far"
    assert verdict.verdict != "not measured"
    (figure,) = recipe.figures
    assert draw(opened, figure, **recipe.figures[figure]).data.height > 0


def eager(made: dict[str, Any]) -> Any:
    """The weights [B, H, Q, K] of each layer, from transformers."""
    made["model"].set_attn_implementation("eager")
    with torch.no_grad():
        return made["model"](**made["inputs"], output_attentions=True).attentions


def test_the_reduction_runs() -> None:
    made = run("A reduction of one's own")
    model, inputs = made["model"], made["inputs"]
    with attnscope.intercept(model) as calls, torch.no_grad():
        model(**inputs)
    for call, A in zip(calls, eager(made), strict=True):
        norms = call.v.norm(dim=-1).repeat_interleave(call.q.shape[1] // call.v.shape[1], 1)
        wanted = A.sum(2) * norms
        torch.testing.assert_close(made["received"][call.site.layer], wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_observer_runs() -> None:
    made = run("An observer")
    with attnscope.watch(made["model"], max_logit=True) as scope:
        made["model"](**made["inputs"])
    assert made["observer"].largest.keys() == set(scope.layers)
    for layer, largest in made["observer"].largest.items():
        wanted = scope.measure("max_logit", layer)
        assert largest.shape == wanted.shape
        torch.testing.assert_close(largest, wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_hook_that_changes_calls_runs() -> None:
    made = run("A hook that changes calls")
    model, inputs, layers = made["model"], made["inputs"], made["scope"].layers
    with attnscope.watch(model) as plain:
        model(**inputs)
    same = [torch.equal(plain.received(n), made["scope"].received(n)) for n in layers]
    assert same[:4] == [True, True, True, False]
