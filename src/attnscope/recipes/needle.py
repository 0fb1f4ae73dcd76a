"""Retrieval heads: which heads copy a needle out of a long text (arXiv 2404.15574).

A sentence (the needle) is hidden at some depth of an unrelated text, and the model is asked for it.
The score of a head is the share of the needle's tokens that were generated at a step where the
head's largest weight was on that token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from attnscope.prompts.needle import recall
from attnscope.recipes.recipe import Recipe, Statistic
from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.recipes.run_tables import by_head, mean, share_above
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run

RETRIEVAL = 0.1
"""The published threshold of a retrieval head."""


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


def found_needles(run: Run, model: str) -> dict[int, bool]:
    """By prompt, whether more than half of the needle's words were generated, as published."""
    spans = run.tokens.filter(pl.col("regions").list.contains("answer"), model=model).collect()
    needles = spans.group_by("prompt", maintain_order=True).agg(pl.col("text").str.join(""))
    completions = dict(run.cells.filter(model=model).select("prompt", "generated").rows())
    return {
        prompt: recall(text, completions[prompt] or "") > 0.5 for prompt, text in needles.rows()
    }


def _statistics(run: Run) -> Iterator[Statistic]:
    what = f"share of heads with a retrieval score above {RETRIEVAL}"
    for model in run.experiment.models:
        right = found_needles(run, model)
        table, prompts = by_head(run, "retrieval", model=model)
        correct = np.array([right.get(prompt, False) for prompt in prompts])
        of = correct[:, None].astype(np.float64)
        yield Statistic(f"{model}: share of needles found", of, mean)
        heads = share_above(RETRIEVAL)
        if correct.any():
            where = f"{model}: {what}, where the needle was found"
            yield Statistic(where, table[correct], heads, "below 0.05")
        if len(table):
            yield Statistic(f"{model}: {what}, in all prompts", table, heads)


RECIPE = Recipe(
    name="needle",
    paper="arXiv 2404.15574",
    question="which heads copy a needle out of a long text?",
    experiment=needle,
    figures={"needle-map": {"measure": "retrieval"}, "head-map": {"measure": "retrieval"}},
    statistics=_statistics,
    claim_lines={
        "needle": ("retrieval[keys=answer, queries=predicts:generated] > 0.1 in at least 1 head",),
    },
)
