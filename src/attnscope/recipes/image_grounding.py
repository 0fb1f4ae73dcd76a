"""Localization heads: which heads attend to what a question is about (arXiv 2503.06287).

The prompts are pictures of coloured shapes with a question about one of them, whose box is known.
Two queries: the word that names the shape, and the last token of the prompt, which predicts the
answer. Two scores of a head: the pointing game (arXiv 1608.00507), and the attention in the box
over that in the picture, relative to the area. Heads are chosen on every second prompt and judged
on the others. The shape in question is drawn at random, so a head that ignores the question points
at it at most as often as one that points at a random shape; and a map that is spread evenly over
the boxes of all shapes shows what looking at shapes alone would give.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from attnscope.recipes.recipe import Recipe, Statistic
from attnscope.recipes.recipe_models import Models, labelled, recipe
from attnscope.recipes.run_tables import Floats, by_head, mean
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run

SHAPES_VLM = ("zoo:shapes-vlm",)
FEW = 3
"""As many heads are enough in the paper."""
POINTING, RATIO = "pointing game", "attention in the box over its area"
BLIND = {
    "shapes": f"{POINTING}, a random shape of the picture",
    "covered": f"{RATIO}, a map that is even over the boxes of all shapes",
}
"""By metadata column: what a head can reach that ignores the question."""


def image_grounding(
    models: Models = SHAPES_VLM, prompts: int = 120, seed: int = 0, **keys: Any
) -> Experiment:
    """Attention to the shape that a question is about, from its name and from the last token."""
    return recipe(
        keys,
        name="image-grounding",
        models=labelled(models),
        prompts={"source": "shapes", "count": prompts, "seed": seed, "mark": {"target": "word"}},
        queries=["region:target", "last"],
        classes=["modality"],
        measures=["grounding", "mass", "profile"],
    )


def best_heads(table: Floats, number: int) -> list[int]:
    """The columns with the largest means over prompts, the best first."""
    order: list[int] = np.argsort(-table.mean(axis=0), kind="stable").tolist()
    return order[:number]


def _statistics(run: Run) -> Iterator[Statistic]:
    for model in run.experiment.models:
        heads = _heads(run, model)
        for queries in run.experiment.queries:
            yield from _of_queries(run, f"{model}, queries {queries}", heads, model, queries)
    first, queries = next(iter(run.experiment.models)), run.experiment.queries[0]
    cells, prompts = _table(run, first, queries, "pointing", column="uniform")
    for column, what in BLIND.items():
        if column in run.prompts.columns:
            of = dict(run.prompts.select("prompt", column).rows())
            blind = np.array([[1 / of[prompt]] for prompt in prompts])
            yield Statistic(what, blind[1::2], mean)
    yield Statistic(f"{POINTING}, a random cell of the map", cells[1::2], mean)


def _of_queries(
    run: Run, what: str, heads: list[tuple[int, int]], model: str, queries: str
) -> Iterator[Statistic]:
    """The best heads of the prompts that choose, in the others; and all heads there."""
    for measure, number, named in (("pointing", 1, POINTING), ("box_ratio", FEW, RATIO)):
        table, prompts = _table(run, model, queries, measure)
        yield _judged(f"{what}: {named}", table, heads, number)
        yield Statistic(f"{what}: {named}, a random head", table[1::2], mean)
        if measure == "pointing" and "task" in run.prompts.columns:
            tasks = dict(run.prompts.select("prompt", "task").rows())
            for task in dict.fromkeys(tasks[prompt] for prompt in prompts):
                of_task = table[[tasks[prompt] == task for prompt in prompts]]
                if len(of_task) > 1:
                    yield _judged(f"{what}: {named}, task {task}", of_task, heads, 1)


def _judged(what: str, table: Floats, heads: list[tuple[int, int]], number: int) -> Statistic:
    """The heads with the largest means of the rows 0, 2, 4 …, in the rows 1, 3, 5 …"""
    best = best_heads(table[::2], number)
    named = ", ".join("{}.{}".format(*heads[column]) for column in best)
    return Statistic(
        f"{what}, {'head' if number == 1 else 'heads'} {named}, chosen on other prompts",
        table[1::2][:, best],
        mean,
    )


def _heads(run: Run, model: str) -> list[tuple[int, int]]:
    """(layer, head) of the columns of the tables."""
    rows = run.values.filter(pl.col("measure") == "pointing", model=model)
    return rows.select("layer", "head").unique().sort("layer", "head").collect().rows()


def _table(
    run: Run, model: str, queries: str, measure: str, column: str = "value"
) -> tuple[Floats, list[int]]:
    """[prompts, heads], and which prompts."""
    where = {"model": model, "queries": queries, "condition": run.experiment.base}
    return by_head(run, measure, column, **where)


RECIPE = Recipe(
    name="image-grounding",
    paper="arXiv 2503.06287",
    question="which heads attend to the part of a picture that the question is about?",
    experiment=image_grounding,
    figures={
        "head-map": {"measure": "pointing"},
        "image-map": {"maps": "pointing", "queries": "region:target", "prompts": [1]},
    },
    statistics=_statistics,
    # The paper's query is the last token, and it finds three heads sufficient. The margins are
    # ours: a head that ignores the question is right in 0.34 of these pictures.
    claim_lines={
        "image-grounding": (
            "box_ratio[queries=region:target] > 1.5 in at least 3 heads",
            "box_ratio[queries=last] > 1.5 in at least 3 heads",
        ),
        "image-pointing": (
            "pointing[queries=region:target] > 0.5 in at least 1 head",
            "pointing[queries=last] > 0.5 in at least 1 head",
        ),
    },
    real=SHAPES_VLM,
    extra="vision",
)
