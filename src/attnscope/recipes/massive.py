"""Massive activations and the sink beside them (arXiv 2402.17762).

The residual stream after a layer has a few entries that are thousands of times the median of all
entries of the text. The statistics are their size, their place, and the attention to the first
token in the layers that read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.prompts.math import math_samples
from attnscope.recipes.recipe import Recipe, Statistic
from attnscope.recipes.recipe_models import SMOLLM2, Models, labelled, recipe
from attnscope.recipes.run_tables import Floats, by_layer, mean
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run


def massive(models: Models = SMOLLM2, prompts: int = 16, seed: int = 0, **keys: Any) -> Experiment:
    """The largest entries of the residual stream after every layer, and first-token mass."""
    return recipe(
        keys,
        name="massive",
        models=labelled(models),
        prompts={"source": "inline", "count": prompts, "records": _questions(prompts, seed)},
        chat=False,
        measures=["residual", "first_token"],
    )


def _questions(count: int, seed: int) -> list[str]:
    """Word problems without the instruction before them, which would give every text the same first
    token, and so the same entries there."""
    samples = math_samples(count, seed=seed, level=5)
    return [
        sample.prompt.text[region.start : region.end]
        for sample in samples
        for region in sample.prompt.regions
        if region.name == "question"
    ]


def sink_before_and_after(sink: Floats, entries: Floats) -> Floats:
    """[prompts, 2]: mean first-token mass of the layers whose input has no massive entry, and of
    those whose input has one; both [prompts, layers]. Prompts without both are left out.

    The input of a layer is the residual stream after the layer before it.
    """
    read = np.concatenate([np.zeros((len(entries), 1), bool), entries[:, :-1] > 0], axis=1)
    both = read.any(1) & ~read.all(1)
    rows = [(s[~r].mean(), s[r].mean()) for s, r in zip(sink[both], read[both], strict=True)]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


def _most_frequent(table: Floats) -> float:
    """The value that most prompts have; of several, the smallest."""
    values, counts = np.unique(table, return_counts=True)
    return float(values[counts.argmax()])


def _statistics(run: Run) -> Iterator[Statistic]:
    for model in run.experiment.models:
        ratio, entries, size, token, dimension = (
            by_layer(run, column, model=model)
            for column in (
                *("residual_ratio", "massive_entries", "residual_largest"),
                *("massive_token", "massive_dimension"),
            )
        )
        sink = by_layer(run, "first_token", model=model)
        peak = np.arange(len(ratio)), ratio.argmax(1)
        is_massive = (entries > 0).astype(np.float64)
        yield Statistic(
            f"{model}: largest entry over the median, in the layer where that is largest",
            ratio[peak][:, None],
            mean,
            "up to about 100,000",
        )
        yield Statistic(f"{model}: that entry", size[peak][:, None], mean)
        yield Statistic(
            f"{model}: its dimension, in most prompts",
            dimension[peak][:, None],
            _most_frequent,
            "LLaMA2-7B: 1415 and 2533",
        )
        yield Statistic(
            f"{model}: the position of its token, in most prompts",
            token[peak][:, None],
            _most_frequent,
            "LLaMA2-7B: 0, and the first delimiter",
        )
        what = f"{model}: share of layers after which an entry is massive"
        yield Statistic(what, is_massive, mean)
        what = (
            f"{model}: first-token mass of layers that read a massive entry, minus that of others"
        )
        yield Statistic(
            what,
            sink_before_and_after(sink, entries),
            lambda pairs: float((pairs[:, 1] - pairs[:, 0]).mean()),
        )


RECIPE = Recipe(
    name="massive",
    paper="arXiv 2402.17762",
    question="which entries of the residual stream are thousands of times the median, and where "
    "does the sink begin?",
    experiment=massive,
    figures={"massive": {}},
    statistics=_statistics,
    claim_lines={
        "massive": (
            "residual_largest > 100 in most layers",
            "residual_ratio > 1000 in most layers",
        ),
    },
)
