"""Lookback ratio: attention to the context against generated tokens, per token (arXiv 2407.07071).

The model solves word problems. For every generated token and head, the ratio is the attention to
the context over the attention to context and generated tokens.
"""

from typing import Any

from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.spec.experiment import Experiment


def lookback(models: Models = SMOLLM2, prompts: int = 12, seed: int = 0, **keys: Any) -> Experiment:
    """Attention to the context and to generated tokens during generation."""
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
