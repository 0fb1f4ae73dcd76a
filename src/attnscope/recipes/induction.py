"""Induction heads: attention to what followed the same token before (arXiv 2209.11895).

The prompt is a sequence of n different random tokens, repeated once. For token i of the second
copy, the token after its first occurrence is i - n + 1. An induction head attends there.
"""

from typing import Any

from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.spec.experiment import Experiment


def induction(
    models: Models = SMOLLM2, prompts: int = 16, seed: int = 0, **keys: Any
) -> Experiment:
    """Attention to the token after the last occurrence, in repeated random tokens."""
    return recipe(
        keys,
        name="induction",
        models=labelled(models),
        # Prompt n is drawn with seed + n; those of two seeds are to share none.
        prompts={
            "source": "tokens",
            "count": prompts,
            "seed": seed * prompts,
            "length": 64,
            "repeats": 2,
        },
        queries=["region:repeat:2"],
        measures=["induction", "previous_token"],
    )
