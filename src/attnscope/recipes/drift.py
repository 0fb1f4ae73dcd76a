"""Instruction drift: what is left of the system prompt after eight turns (arXiv 2402.10962).

The prompts are conversations with a persona as the system prompt. Measured is the attention of each
assistant turn to it. In a longer text every part gets less attention, so the fall is compared with
uniform attention.
"""

from typing import Any

from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.spec.experiment import Experiment

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
