"""Streaming and retrieval heads (DuoAttention, arXiv 2410.10819; StreamingLLM, 2309.17453).

A streaming head attends to the first few tokens and to recent ones, so that it needs no other keys.
The statistic is the attention that a head puts on all other tokens: beyond the first 4 and the last
64. It is compared with the retrieval score of the same heads, which find a needle in the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.recipes.needle import RETRIEVAL
from attnscope.recipes.recipe import Recipe, Statistic
from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.recipes.run_tables import Floats, by_head, mean, share_above
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run

STREAMING, FULL = 0.1, 0.5
"""A head with less than the first on the rest of the text is streaming; with more than the second
it attends mostly to the rest. Both are ours: the paper learns a gate for each head."""
ANSWER = "predicts:generated"


def streaming(
    models: Models = SMOLLM2, prompts: int = 16, seed: int = 0, **keys: Any
) -> Experiment:
    """Attention beyond the first and the recent tokens, in a text with a needle and its answer."""
    return recipe(
        keys,
        name="streaming",
        models=labelled(models),
        prompts={"source": "needle", "count": prompts, "seed": seed, "lengths": [200]},
        generate={"max_new_tokens": 20},
        queries=["all", ANSWER],
        keys=["answer"],
        measures=["by_distance", "retrieval"],
    )


def _share_below(threshold: float) -> Any:
    return lambda table: float((table.mean(axis=0) < threshold).mean())


def _retrieval_against_others(table: Floats) -> float:
    """Of [prompts, 2 · heads], retrieval scores and then attention to the rest: the mean attention
    to the rest of the retrieval heads, minus that of all other heads; nan without either."""
    score, rest = (half.mean(axis=0) for half in np.split(table, 2, axis=1))
    above = score > RETRIEVAL
    if above.all() or not above.any():
        return float("nan")
    return float(rest[above].mean() - rest[~above].mean())


def _statistics(run: Run) -> Iterator[Statistic]:
    for model in run.experiment.models:
        for queries, when in (("all", "in the whole text"), (ANSWER, "while it answers")):
            table, prompts = by_head(run, "on_rest", model=model, queries=queries)
            what = f"{model}: attention beyond first and recent tokens {when}, mean over heads"
            yield Statistic(what, table, mean)
            what = f"{model}: share of streaming heads {when} (below {STREAMING})"
            yield Statistic(what, table, _share_below(STREAMING))
            what = f"{model}: share of heads with more than {FULL} on the rest {when}"
            yield Statistic(what, table, share_above(FULL), "kept in full: 25 % (MHA), 50 % (GQA)")
        score, scored = by_head(run, "retrieval", model=model, queries=ANSWER)
        both = [prompt for prompt in prompts if prompt in set(scored)]
        rows = [table[prompts.index(prompt)] for prompt in both]
        scores = [score[scored.index(prompt)] for prompt in both]
        what = (
            f"{model}: attention to the rest while it answers, retrieval heads (score above "
            f"{RETRIEVAL}) minus others"
        )
        joined = np.concatenate([np.array(scores), np.array(rows)], axis=1)
        yield Statistic(what, joined, _retrieval_against_others)


RECIPE = Recipe(
    name="streaming",
    paper="arXiv 2410.10819",
    question="which heads need more than the first and the recent tokens?",
    experiment=streaming,
    figures={"head-strip": {"measure": "on_rest"}, "head-map": {"measure": "on_rest"}},
    statistics=_statistics,
    claim_lines={
        "streaming": (
            "on_rest[queries=all] < 0.5 in most heads",
            "on_rest[queries=all] > 0.5 in at least 1 head",
        ),
    },
)
