"""Attention sinks: how much of it goes to the first token (arXiv 2410.10781).

The statistic is the share of heads whose first-token mass, mean over 64 queries and over prompts,
is above 0.3: on text, on tokens drawn at random, and with and without a begin-of-sequence token
where the model has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attnscope.recipes.recipe import Recipe, Statistic
from attnscope.recipes.recipe_models import SMOLLM2, Models, begins, labelled, recipe
from attnscope.recipes.run_tables import by_head
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run

SINK = 0.3
"""The published threshold of a sink."""
PUBLISHED = {"random": "GPT2-XL 0.703, LLaMA3-8B 0.912"}


def sinks(models: Models = SMOLLM2, prompts: int = 32, seed: int = 0, **keys: Any) -> Experiment:
    """Attention to the first token: text and random tokens, with and without BOS."""
    chosen = labelled(models)
    bos = all(begins(name) for name in chosen.values())
    random = seed * prompts  # prompt n is drawn with seed + n; those of two seeds share none
    conditions: dict[str, Any] = {"text": {}, "random": {"random": random}}
    if bos:
        conditions |= {"no-bos": {"bos": False}, "random-no-bos": {"random": random, "bos": False}}
    return recipe(
        keys,
        name="sinks",
        models=chosen,
        prompts={"source": "math", "count": prompts, "seed": seed, "level": 5},
        chat=False,
        bos=bos,
        truncate=64,
        conditions=conditions,
        measures=["first_token"],
    )


def sink_share(table: Any) -> float:
    """As published: the share of heads above the threshold in a prompt, mean over prompts."""
    return float((table > SINK).mean())


def _statistics(run: Run) -> Iterator[Statistic]:
    for model in run.experiment.models:
        for condition in run.experiment.conditions:
            table, _ = by_head(run, "first_token", model=model, condition=condition)
            what = f"{model}, {condition}: share of heads with first-token mass above {SINK}"
            yield Statistic(what, table, sink_share, PUBLISHED.get(condition, ""))


RECIPE = Recipe(
    name="sinks",
    paper="arXiv 2410.10781",
    question="how many heads put more than 0.3 of their attention on the first token?",
    experiment=sinks,
    figures={"head-map": {"measure": "first_token"}},
    statistics=_statistics,
    claim_lines={
        "sinks": ("first_token[condition=text] > 0.3 in most heads",),
        "sinks-random": ("first_token[condition=random] > 0.3 in most heads",),
    },
)
