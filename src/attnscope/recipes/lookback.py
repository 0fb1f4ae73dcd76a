"""Lookback ratio: context against the model's own words, token by token (arXiv 2407.07071).

The model answers word problems; of every new token and head, how much attention goes to the
context, of what goes to context and new tokens.
"""

from typing import Any

from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.spec.experiment import Experiment


def lookback(models: Models = SMOLLM2, prompts: int = 12, seed: int = 0, **keys: Any) -> Experiment:
    """Attention to the context and to its own words while a model answers."""
    return recipe(
        keys,
        name="lookback",
        models=labelled(models),
        prompts={"source": "math", "count": prompts, "seed": seed},
        generate={"max_new_tokens": 24},
        queries=["predicts:generated"],
        keys=["question", "generated"],
        classes=["whole"],
        measures=["lookback", "step_mass"],
    )
