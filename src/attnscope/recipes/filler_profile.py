"""Average attention weight per token, without and with a filler (arXiv 2510.01032).

One model; profiles of its first layer and of the heads that the paper calls 1, 2 and 8: here 0, 1
and 7. λ and the rest are measured in the first three layers, every head. 55 slashes go between
system prompt and question, by ids, so that they are 55 tokens and nothing else changes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from attnscope.recipes.recipe import Recipe
from attnscope.recipes.recipe_models import Models, heads_of, labelled, recipe, with_the_first_three
from attnscope.spec.experiment import Experiment

HEADS = (0, 1, 7)
"""The heads shown, from 0: those that the paper calls 1, 2 and 8."""
SLASHES = {"kind": "repeat", "unit": "/", "count": 55}
MEASURES = ("profile", "lambda", "uniform_slope", "spikes", "uniformity", "value_similarity")


def filler_profile(
    models: Models = ("zoo:math-qwen2",),
    prompts: int = 64,
    seed: int = 0,
    layers: Any = (0,),
    heads: Any = None,
    **keys: Any,
) -> Experiment:
    """Average attention weight per token in the first layer, without and with 55 slashes."""
    # `layers` and `heads` are those whose profiles are kept; λ and the rest are of all heads.
    chosen = labelled(models)
    if heads is None:
        heads = heads_of(chosen, dict.fromkeys(chosen, HEADS))
    return filler_experiment(
        "filler-profile",
        chosen,
        (prompts, seed),
        {"filler": SLASHES},
        layers,
        heads,
        MEASURES,
        keys,
    )


def filler_experiment(
    name: str,
    models: Mapping[str, str],
    prompts: tuple[int, int],
    inserts: Mapping[str, Mapping[str, Any]],
    layers: Any,
    heads: Any,
    measures: Sequence[str],
    keys: Mapping[str, Any],
) -> Experiment:
    """Insertions between system prompt and question, by ids; so many prompts of a seed; profiles of
    these layers and heads."""
    count, seed = prompts
    return recipe(
        keys,
        name=name,
        models=models,
        prompts={"source": "math", "count": count, "seed": seed},
        conditions={
            "base": {},
            **{
                n: {"insert": what, "position": "between", "by": "ids"}
                for n, what in inserts.items()
            },
        },
        layers=with_the_first_three(layers),
        profiles={"layers": layers, "heads": heads},
        queries=["all"],
        # Some models put most of their attention on the first token, which would decide a slope.
        keys=["all", "not-first"],
        measures=[*measures, "affine", "affine_heads", "mass", "entropy", "first_token"],
    )


# Any insertion reduces the attention to the tokens around it. So a fall is compared with the fall
# under uniform attention in the same prompt, and with that of a random sentence. `by` is the
# smallest difference that counts. Layers are counted from 0: "layer 1" of the paper is layer 0. The
# numbers in thresholds, bounds and `by` are ours, because the paper gives none.
RECIPE = Recipe(
    name="filler-profile",
    paper="arXiv 2510.01032",
    question="what does a filler do to the attention of all other tokens?",
    experiment=filler_profile,
    figures={"filler-profile": {}},
    # Layer 1 of the paper is layer 0. The margins are ours, because the paper gives none. Any
    # insertion lowers the attention to other tokens, so a fall is compared with the uniform one.
    claim_lines={
        "fall": (
            "lambda_ratio[condition=kind:repeat] <= 0.95 * "
            "uniform_ratio[condition=kind:repeat] in layer 0",
            "lambda_ratio[condition=kind:repeat] < uniform_ratio[condition=kind:repeat] in "
            "most heads of layer 0",
            "spike_ratio[condition=kind:repeat] <= 0.95 * rest_ratio[condition=kind:repeat] "
            "in layer 0",
            "spike_fall[condition=kind:repeat] > 0.5 in most heads of layer 0",
        ),
        "one-factor": (
            "lambda_ratio[condition=kind:repeat] <= 0.95 * "
            "uniform_ratio[condition=kind:repeat] in layer 0",
            "lambda_r2[condition=kind:repeat] > 0.9 in most heads of layer 0",
            "lambda[condition=kind:repeat] within 0.9 .. 1.1 * "
            "lambda_ratio[condition=kind:repeat] in most heads of layer 0",
            "spike_ratio[condition=kind:repeat] within 0.8 .. 1.25 * "
            "rest_ratio[condition=kind:repeat] in most heads of layer 0",
        ),
        "affine": ("affine_r2[condition=kind:repeat] > 0.9 in layer 0",),
        "affine-heads": ("affine_heads_r2[condition=kind:repeat] > 0.9 in layer 0",),
        "affine-first-layer-only": (
            "affine_r2[condition=kind:repeat] > 0.9 in layer 0",
            "affine_r2[condition=kind:repeat] < 0.9 in every layer of layers 1, 2",
            "affine_r2[condition=kind:repeat, layer=1] <= affine_r2[condition=kind:repeat, "
            "layer=0] - 0.05",
            "affine_r2[condition=kind:repeat, layer=2] <= affine_r2[condition=kind:repeat, "
            "layer=0] - 0.05",
        ),
    },
)
