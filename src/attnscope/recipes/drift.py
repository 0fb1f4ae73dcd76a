"""Instruction drift: what is left of the system prompt after eight turns (arXiv 2402.10962).

Conversations with a persona as the system prompt; the attention of every one of the assistant's
replies to it. Any text that grows has less left for its beginning, so what counts is the fall
beside that of uniform attention.
"""

from typing import Any

from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.spec.experiment import Experiment

TURNS = 8


def drift(models: Models = SMOLLM2, prompts: int = 16, seed: int = 0, **keys: Any) -> Experiment:
    """Attention of every reply to the system prompt, over eight turns."""
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
