"""Instruction drift: what is left of the system prompt after eight turns (arXiv 2402.10962).

The prompts are conversations with a persona as the system prompt. Measured is the attention of each
assistant turn to it. In a longer text every part gets less attention, so the fall is compared with
uniform attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attnscope.recipes.recipe import Recipe, Statistic
from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.recipes.run_tables import lift_of_ends
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run

TURNS = 8


def drift(models: Models = SMOLLM2, prompts: int = 16, seed: int = 0, **keys: Any) -> Experiment:
    """Attention of every assistant turn to the system prompt, over eight turns."""
    return recipe(
        keys,
        name="drift",
        models=labelled(models),
        prompts={"source": "conversations", "count": prompts, "seed": seed, "turns": TURNS},
        queries=[f"region:turn:{turn}:assistant" for turn in range(1, TURNS + 1)],
        keys=["system"],
        classes=["whole"],
        measures=["mass"],
    )


def _statistics(run: Run) -> Iterator[Statistic]:
    for model in run.experiment.models:
        yield from lift_of_ends(run, model, "queries")


RECIPE = Recipe(
    name="drift",
    paper="arXiv 2402.10962",
    question="how much less attention does the system prompt get after eight turns?",
    experiment=drift,
    figures={"order": {}},
    statistics=_statistics,
    claim_lines={
        "drift": (
            "mass[as=lift, keys=system, queries=region:turn:8:assistant] <= 0.95 * "
            "mass[as=lift, keys=system, queries=region:turn:1:assistant]",
        ),
    },
)
