"""Position bias: attention to documents by where they stand (arXiv 2406.16008).

Ten documents that say nothing in particular, drawn anew for every place, and a question. Published
is a U: the first and the last get more than those between.
"""

from typing import Any

from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.spec.experiment import Experiment

DOCUMENTS = 10


def position(models: Models = SMOLLM2, prompts: int = 16, seed: int = 0, **keys: Any) -> Experiment:
    """Attention of the last token to ten documents, by their place."""
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
