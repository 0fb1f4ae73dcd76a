"""Average attention weight per token, without and with a filler (arXiv 2510.01032).

One model; profiles of its first layer and of the heads that the paper calls 1, 2 and 8: here 0, 1
and 7. λ and the rest are measured in the first three layers, every head. 55 slashes go between
system prompt and question, by ids, so that they are 55 tokens and nothing else changes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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
