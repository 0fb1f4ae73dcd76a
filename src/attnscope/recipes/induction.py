"""Induction heads: attention to what followed the same token before (arXiv 2209.11895).

The prompt is a sequence of n different random tokens, repeated once. For token i of the second
copy, the token after its first occurrence is i - n + 1. An induction head attends there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attnscope.recipes.recipe import Recipe, Statistic
from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.recipes.run_tables import by_head, share_above
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run

THRESHOLD = 0.3
"""Of an induction head. The paper has none; this one is that of sinks."""


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


def _statistics(run: Run) -> Iterator[Statistic]:
    for model in run.experiment.models:
        table, _ = by_head(run, "induction", model=model)
        what = f"{model}: share of heads with an induction score above {THRESHOLD}"
        yield Statistic(what, table, share_above(THRESHOLD))


RECIPE = Recipe(
    name="induction",
    paper="arXiv 2209.11895",
    question="which heads attend to what followed the same token before?",
    experiment=induction,
    figures={"head-map": {"measure": "induction"}},
    statistics=_statistics,
    claim_lines={
        "induction": ("induction[queries=region:repeat:2] > 0.3 in at least 1 head",),
    },
)
