"""Heavy hitters: a fifth of the keys holds most of the attention (H2O, arXiv 2306.14048).

The paper keeps a fifth of the KV cache: the keys with the largest sums of attention, and the recent
ones. The statistic is the share of all attention that the top fifth receives, head by head, beside
what uniform attention would give.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attnscope.recipes.recipe import Recipe, Statistic
from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.recipes.run_tables import Floats, by_head, mean, share_above
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run

KEPT = "0.2"
"""The share of the cache that the paper keeps."""


def heavy(models: Models = SMOLLM2, prompts: int = 16, seed: int = 0, **keys: Any) -> Experiment:
    """The share of the attention that the most attended keys receive, in texts of ten documents."""
    return recipe(
        keys,
        name="heavy",
        models=labelled(models),
        prompts={"source": "documents", "count": prompts, "seed": seed, "words": 10},
        chat=False,
        measures=["top_share"],
    )


def _smallest(table: Floats) -> float:
    return float(table.mean(axis=0).min())


def _largest(table: Floats) -> float:
    return float(table.mean(axis=0).max())


def _statistics(run: Run) -> Iterator[Statistic]:
    for model in run.experiment.models:
        table, _ = by_head(run, "top_share", model=model, item=KEPT)
        what = f"{model}: share of the attention on the top fifth of the keys, mean over heads"
        yield Statistic(what, table, mean)
        uniform, _ = by_head(run, "top_share", "uniform", model=model, item=KEPT)
        yield Statistic(f"{model}: the same under uniform attention", uniform, mean)
        yield Statistic(f"{model}: the smallest of any head", table, _smallest)
        yield Statistic(f"{model}: the largest of any head", table, _largest)
        what = f"{model}: share of heads with more than 0.9 on the top fifth"
        yield Statistic(what, table, share_above(0.9))


RECIPE = Recipe(
    name="heavy",
    paper="arXiv 2306.14048",
    question="how much attention do the most attended fifth of the keys hold?",
    experiment=heavy,
    figures={"top-share": {}},
    statistics=_statistics,
    claim_lines={"heavy": ("top_share[class=0.2] > 0.6 in most heads",)},
)
