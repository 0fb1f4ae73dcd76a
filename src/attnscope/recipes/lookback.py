"""Lookback ratio: attention to the context against generated tokens, per token (arXiv 2407.07071).

The model solves word problems. For every generated token and head, the ratio is the attention to
the context over the attention to context and generated tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attnscope.recipes.recipe import Recipe, Statistic
from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.recipes.run_tables import by_head, mean
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run


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


def _statistics(run: Run) -> Iterator[Statistic]:
    for model in run.experiment.models:
        for measure, how in (
            ("lookback_per_token", "per token as published"),
            ("lookback", "of masses"),
        ):
            table, _ = by_head(run, measure, model=model)
            yield Statistic(f"{model}: lookback ratio, mean over heads, {how}", table, mean)


RECIPE = Recipe(
    name="lookback",
    paper="arXiv 2407.07071",
    question="context or generated tokens: which get more attention during generation?",
    experiment=lookback,
    figures={"steps": {}, "head-map": {"measure": "lookback_per_token"}},
    statistics=_statistics,
    claim_lines={
        "lookback": ("lookback_per_token[queries=predicts:generated] < 0.5",),
    },
)
