"""Position bias: attention to documents by their position (arXiv 2406.16008).

The prompt has ten unrelated documents in random order, and a question. The published result is a U:
the first and the last document get more attention than those between.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.recipes.recipe import Recipe, Statistic
from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.recipes.run_tables import lift_of_ends, lift_table
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run

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


def _ends_over_middle(table: Any) -> float:
    return float(table[:, 0].mean() / table[:, 1].mean())


def _statistics(run: Run) -> Iterator[Statistic]:
    for model in run.experiment.models:
        lift = lift_table(run, model, "keys")
        middle = lift[:, lift.shape[1] // 2 - 1 : lift.shape[1] // 2 + 1]
        both = np.stack([lift[:, [0, -1]].mean(1), middle.mean(1)], axis=1)
        what = f"{model}: the ends' lift over the middle's"
        yield Statistic(what, both, _ends_over_middle, "a U: above 1")
        yield from lift_of_ends(run, model, "keys")


RECIPE = Recipe(
    name="position",
    paper="arXiv 2406.16008",
    question="do first and last documents get more attention?",
    experiment=position,
    figures={"order": {}},
    statistics=_statistics,
    claim_lines={
        "position": (
            "mass[as=lift, queries=last, keys=document:1] >= 1.05 * mass[as=lift, "
            "queries=last, keys=document:5]",
            "mass[as=lift, queries=last, keys=document:10] >= 1.05 * mass[as=lift, "
            "queries=last, keys=document:5]",
        ),
    },
)
