"""Attention to token types: how much of it goes to `#`, `*` and whitespace of the maps.

Two models, the same spatial prompts, four layers (arXiv 2512.24532). The published figure does not
say which queries it counts; here all of them do, heads are combined by their mean, and keys are
the tokens of the maps alone, because `*` stands in the instructions too. Each is an option.
"""

from typing import Any

from attnscope.recipes.recipe import Recipe
from attnscope.recipes.recipe_models import Models, labelled, layers_of, recipe
from attnscope.spec.experiment import Experiment

PUBLISHED, LAYERS = (0, 16, 20, 27), 28
"""The layers of the published figure, and how many its model has."""


def token_types(
    models: Models = ("zoo:spatial-base", "zoo:spatial-phys"),
    prompts: int = 64,
    seed: int = 0,
    layers: Any = None,
    **keys: Any,
) -> Experiment:
    """Attention to #, * and whitespace in the maps, per layer, model beside model."""
    chosen = labelled(models)
    return recipe(
        keys,
        name="token-types",
        models=chosen,
        # Problems that a model trained on the other split has not seen.
        prompts={
            "source": "spatial",
            "count": prompts,
            "seed": seed,
            "task": "action",
            "split": "test",
        },
        layers=layers_of(chosen, PUBLISHED, LAYERS) if layers is None else layers,
        queries=["all"],
        keys=["maps"],
        classes=["maps"],
        measures=["mass"],
    )


RECIPE = Recipe(
    name="token-types",
    paper="arXiv 2512.24532",
    question="which characters of a map get attention, before and after training?",
    experiment=token_types,
    figures={"token-types": {"items": ["hash", "star", "whitespace"]}},
    real=("zoo:smollm2", "zoo:smollm2-phys"),
    claim_lines={
        "maps": ("mass[keys=maps, model=b] >= 1.05 * mass[keys=maps, model=a] in each layer",),
        "map-characters": (
            "mass[keys=maps, class=hash+star, model=b] >= 1.05 * mass[keys=maps, "
            "class=hash+star, model=a] in each layer",
        ),
    },
)
