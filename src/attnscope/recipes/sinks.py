"""Attention sinks: how much of it goes to the first token (arXiv 2410.10781).

The statistic is the share of heads whose first-token mass, mean over 64 queries and over prompts,
is above 0.3: on text, on tokens drawn at random, and with and without a begin-of-sequence token
where the model has one.
"""

from typing import Any

from attnscope.recipes.recipe_models import SMOLLM2, Models, begins, labelled, recipe
from attnscope.spec.experiment import Experiment


def sinks(models: Models = SMOLLM2, prompts: int = 32, seed: int = 0, **keys: Any) -> Experiment:
    """Attention to the first token: text and random tokens, with and without BOS."""
    chosen = labelled(models)
    bos = all(begins(name) for name in chosen.values())
    random = seed * prompts  # prompt n is drawn with seed + n; those of two seeds share none
    conditions: dict[str, Any] = {"text": {}, "random": {"random": random}}
    if bos:
        conditions |= {"no-bos": {"bos": False}, "random-no-bos": {"random": random, "bos": False}}
    return recipe(
        keys,
        name="sinks",
        models=chosen,
        prompts={"source": "math", "count": prompts, "seed": seed, "level": 5},
        chat=False,
        bos=bos,
        truncate=64,
        conditions=conditions,
        measures=["first_token"],
    )
