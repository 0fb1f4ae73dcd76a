"""Alignment heads of Whisper: cross-attention that follows the sound (arXiv 2212.04356).

OpenAI derives the times of words from some heads of each Whisper model, and publishes their list.
The sound and the transcript of a sentence are given. The score of a head is the rank correlation of
token order and the mean position of its attention in the sound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from attnscope.recipes.recipe import Recipe, Statistic
from attnscope.recipes.recipe_models import Models, labelled, recipe
from attnscope.recipes.run_tables import by_head
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run

WHISPER = ("zoo:whisper-tiny-en",)
QUERIES = "predicts:transcript"


def alignment(
    models: Models = WHISPER, prompts: int = 12, seed: int = 0, **keys: Any
) -> Experiment:
    """Whether the cross-attention of each head moves through the sound as the words do."""
    return recipe(
        keys,
        name="alignment",
        models=labelled(models),
        prompts={"source": "speech", "count": prompts, "seed": seed},
        queries=[QUERIES],
        measures=["alignment", "word_mass"],
    )


def published_heads(run: Run, model: str) -> list[tuple[int, int]]:
    """(layer, head) of the published alignment heads of a model; none for other models."""
    from attnscope import zoo

    name = run.experiment.models[model].removeprefix(zoo.PREFIX)
    return list(zoo.FETCHED[name].alignment_heads) if name in zoo.FETCHED else []


def auroc(chosen: Sequence[bool]) -> Callable[[NDArray[np.float64]], float]:
    """How often a chosen head has a larger mean over prompts than another; 0.5 for equal ones."""
    of_list = np.array(chosen)

    def area(table: NDArray[np.float64]) -> float:
        means = table.mean(axis=0)
        pairs = means[of_list][:, None] - means[~of_list]
        return float(((pairs > 0) + 0.5 * (pairs == 0)).mean())

    return area


def _tables(run: Run, model: str) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Scores of all heads [prompts, heads], with what they are."""
    yield "alignment", by_head(run, "alignment", model=model)[0]
    words = {"predicted": "the word that is predicted", "read": "the word that was read last"}
    for item, word in words.items():
        yield f"mass on {word}", by_head(run, "word_mass", model=model, item=item)[0]


def _names(heads: Sequence[tuple[int, int]]) -> str:
    return "listed: " + ", ".join(f"{layer}.{head}" for layer, head in heads)


def _statistics(run: Run) -> Iterator[Statistic]:
    for model in run.experiment.models:
        rows = run.values.filter(pl.col("measure") == "alignment", model=model)
        heads = rows.select("layer", "head").unique().sort("layer", "head").collect().rows()
        published = published_heads(run, model)
        for what, table in _tables(run, model):
            if published:
                listed = auroc([head in published for head in heads])
                named = f"{model}: AUROC of {what}, listed heads against the others"
                yield Statistic(named, table, listed, _names(published))
        table = by_head(run, "alignment", model=model)[0]
        for title, kept in (("listed", True), ("other", False)):
            columns = [n for n, head in enumerate(heads) if (head in published) is kept]
            if published and columns:
                what = f"{model}: mean alignment of the {title} heads"
                yield Statistic(what, table[:, columns], lambda part: float(part.mean()))


RECIPE = Recipe(
    name="alignment",
    paper="arXiv 2212.04356",
    question="which cross-attention heads of Whisper follow the sound?",
    experiment=alignment,
    figures={"head-map": {"measure": "alignment"}},
    statistics=_statistics,
    claim_lines={
        "alignment": (f"alignment[queries={QUERIES}] > 0.7 in at least 8 heads",),
    },
    real=WHISPER,
)
