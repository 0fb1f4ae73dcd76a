"""Attention to image tokens and to the other tokens, layer by layer (arXiv 2403.06764).

FastV drops half of the image tokens after layer 2, because in deep layers they get little attention
for their number. Measured is the mass on image tokens, for the last query and for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.recipes.image_grounding import SHAPES_VLM
from attnscope.recipes.recipe import Recipe, Statistic
from attnscope.recipes.recipe_models import Models, labelled, recipe
from attnscope.recipes.run_tables import Floats, by_head, by_layer, mean
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run

SHALLOW = 2
"""FastV compares the first two layers with the others."""
ITEMS = ("image", "text", "special")


def image_tokens(
    models: Models = SHAPES_VLM, prompts: int = 48, seed: int = 0, **keys: Any
) -> Experiment:
    """Mass on image tokens and on the other tokens, over layers."""
    return recipe(
        keys,
        name="image-tokens",
        models=labelled(models),
        prompts={"source": "shapes", "count": prompts, "seed": seed},
        queries=["last", "all"],
        classes=["modality"],
        measures=["mass"],
    )


def _statistics(run: Run) -> Iterator[Statistic]:
    for model in run.experiment.models:
        for queries in run.experiment.queries:
            where = {"model": model, "queries": queries, "keys": run.experiment.keys[0]}
            where |= {"condition": run.experiment.base, "classes": "modality"}
            mass = {item: by_layer(run, "mass", item=item, **where) for item in ITEMS}
            count = {
                item: by_head(run, "mass", "tokens", item=item, **where)[0][:, :1] for item in ITEMS
            }
            image, *others = ITEMS
            rest = sum(mass[item] for item in others) / sum(count[item] for item in others)
            both = np.stack([mass[image] / count[image], rest], axis=-1)
            yield from _layers(f"{model}, queries {queries}", mass[image], both)
            uniform, _ = by_head(run, "mass", "uniform", item=image, **where)
            what = f"{model}, queries {queries}: mass on image tokens under uniform attention"
            yield Statistic(what, uniform, mean)


def _layers(what: str, mass: Floats, both: Floats) -> Iterator[Statistic]:
    """The first layers beside the others: mass, and attention to an image token over that to
    another token."""
    parts = {f"layers 0–{SHALLOW - 1}": slice(SHALLOW), "deeper layers": slice(SHALLOW, None)}
    parts = {name: layers for name, layers in parts.items() if mass[:, layers].size}
    for name, layers in parts.items():
        yield Statistic(f"{what}: mass on image tokens, {name}", mass[:, layers], mean)
    for name, layers in parts.items():
        ratio = f"{what}: attention to an image token over that to another token, {name}"
        yield Statistic(ratio, both[:, layers], _ratio_of_means)


def _ratio_of_means(both: Floats) -> float:
    image, rest = both.mean(axis=(0, 1))
    return float(image / rest)


RECIPE = Recipe(
    name="image-tokens",
    paper="arXiv 2403.06764",
    question="how much attention do image tokens get for their number, layer by layer?",
    experiment=image_tokens,
    figures={"modality-depth": {}},
    statistics=_statistics,
    # The paper gives no threshold; a half is ours.
    claim_lines={
        "image-tokens": (
            "mass[classes=modality, class=image, as=per-token, queries=last] <= 0.5 * "
            "mass[classes=modality, class=text+special, as=per-token, queries=last] in most layers",
        ),
    },
    real=SHAPES_VLM,
    extra="vision",
)
