"""Receiver heads: a few sentences get their attention from far behind (arXiv 2506.19143).

A text is a word problem and its worked solution, in sentences. The score of a head is the kurtosis,
over sentences, of the attention that a sentence gets from sentences at least 4 later. The
statistics ask whether the heads with the largest scores are the same on other texts, and how much
of this is the sink: the first token belongs to the first sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.prompts.worked import worked_solutions
from attnscope.recipes.recipe import Recipe, Statistic
from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.recipes.run_tables import Floats, by_head, mean
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run

HEADS = 20
"""The published number of receiver heads; at most a fifth of a model's heads."""
KEYS = {"all": "whole text", "not-first": "without the first token", "solution": "solution alone"}


def receivers(
    models: Models = SMOLLM2, prompts: int = 16, seed: int = 0, **keys: Any
) -> Experiment:
    """How few sentences of a worked solution receive the attention of later sentences."""
    records = list(worked_solutions(prompts, seed=seed))
    return recipe(
        keys,
        name="receivers",
        models=labelled(models),
        prompts={
            "source": "inline",
            "count": prompts,
            "records": records,
            "template": "{question}\n\n{solution}",
        },
        chat=False,
        keys=list(KEYS),
        measures=["receivers"],
    )


def top(scores: Floats) -> NDArray[np.bool_]:
    """Which heads have the largest scores [heads]: the published number of them."""
    number = max(1, min(HEADS, len(scores) // 5))
    chosen = np.zeros(len(scores), dtype=bool)
    chosen[np.argsort(-scores, kind="stable")[:number]] = True
    return chosen


def halves(table: Floats) -> Floats:
    """[pairs, 2 · heads]: every prompt of one half beside a prompt of the other. Intervals resample
    such pairs, so that no prompt gets into both halves."""
    pairs = len(table) // 2
    return np.concatenate([table[0 : 2 * pairs : 2], table[1 : 2 * pairs : 2]], axis=1)


def _both(table: Floats) -> tuple[Floats, Floats]:
    """The mean score of every head in each half."""
    one, other = np.split(table.mean(axis=0), 2)
    return one, other


def rank_correlation(table: Floats) -> float:
    """Spearman's correlation of the heads' scores in the two halves."""
    one, other = (np.argsort(np.argsort(scores, kind="stable")) for scores in _both(table))
    return float(np.corrcoef(one, other)[0, 1])


def same_heads(table: Floats) -> float:
    """The share of the top heads of one half that are top heads of the other."""
    one, other = (top(scores) for scores in _both(table))
    return float((one & other).sum() / one.sum())


def held_out(table: Floats) -> float:
    """The score of the top heads of each half in the other half, mean of both ways."""
    one, other = _both(table)
    return float((other[top(one)].mean() + one[top(other)].mean()) / 2)


def _first_sentence(scores: Floats) -> Callable[[Floats], float]:
    """Of which sentence gets most [prompts, heads], in the top heads: how often the first."""
    chosen = top(scores.mean(axis=0))
    return lambda sentences: float((sentences[:, chosen] == 0).mean())


def _statistics(run: Run) -> Iterator[Statistic]:
    for model in run.experiment.models:
        for keys in (key for key in KEYS if key in run.experiment.keys):
            scores, _ = by_head(run, "receiver_kurtosis", model=model, keys=keys)
            sentences, _ = by_head(run, "receiver_sentence", model=model, keys=keys)
            if len(scores) < 2:
                continue
            number, pairs = int(top(scores[0]).sum()), halves(scores)
            what = f"{model}, {KEYS[keys]}"
            yield Statistic(f"{what}: kurtosis, mean over heads", scores, mean)
            label = f"{what}: kurtosis of the {number} top heads of one half, in the other half"
            yield Statistic(label, pairs, held_out)
            label = f"{what}: rank correlation of the heads between halves of the texts"
            yield Statistic(label, pairs, rank_correlation)
            chance = number / scores.shape[1]
            label = f"{what}: share of top heads that both halves have (by chance {chance:.2g})"
            yield Statistic(label, pairs, same_heads)
            label = f"{what}: how often the first sentence gets most, of the {number} top heads"
            yield Statistic(label, sentences, _first_sentence(scores))


RECIPE = Recipe(
    name="receivers",
    paper="arXiv 2506.19143",
    question="which heads attend to few sentences from far behind, and are they the same heads in "
    "other texts?",
    experiment=receivers,
    figures={
        "head-strip": {"measure": "receiver_kurtosis", "keys": "solution"},
        "head-map": {"measure": "receiver_kurtosis", "keys": "solution"},
    },
    statistics=_statistics,
    claim_lines={"receivers": ("receiver_kurtosis[keys=solution] > 3 in at least 20 heads",)},
)
