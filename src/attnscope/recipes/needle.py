"""Retrieval heads: which heads copy a needle out of a long text (arXiv 2404.15574).

A sentence (the needle) is hidden at some depth of an unrelated text, and the model is asked for it.
The score of a head is the share of the needle's tokens that were generated at a step where the
head's largest weight was on that token.
"""

from typing import Any

from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.spec.experiment import Experiment


def needle(models: Models = SMOLLM2, prompts: int = 30, seed: int = 0, **keys: Any) -> Experiment:
    """Heads that copy a needle, at five depths of texts of three lengths."""
    return recipe(
        keys,
        name="needle",
        models=labelled(models),
        prompts={"source": "needle", "count": prompts, "seed": seed, "lengths": [50, 100, 200]},
        generate={"max_new_tokens": 24},
        queries=["predicts:generated"],
        keys=["answer"],
        classes=["whole"],
        measures=["retrieval", "mass"],
    )
