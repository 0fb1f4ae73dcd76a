"""Position bias: attention to documents by their position (arXiv 2406.16008).

The prompt has ten unrelated documents in random order, and a question. The published result is a U:
the first and the last document get more attention than those between.
"""

from typing import Any

from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.spec.experiment import Experiment

DOCUMENTS = 10


def position(models: Models = SMOLLM2, prompts: int = 16, seed: int = 0, **keys: Any) -> Experiment:
    """Attention of the last token to ten documents, by their position."""
    return recipe(
        keys,
        name="position",
        models=labelled(models),
        prompts={"source": "documents", "count": prompts, "seed": seed, "documents": DOCUMENTS},
        queries=["last"],
        keys=[f"document:{number}" for number in range(1, DOCUMENTS + 1)],
        classes=["whole"],
        measures=["mass"],
    )
