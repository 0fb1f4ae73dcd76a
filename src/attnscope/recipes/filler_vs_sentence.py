"""A filler against a random sentence of equal length (arXiv 2510.01032).

One head of each model: the paper's where a model is one of the paper's, its first otherwise. Both
insertions go by ids, so that they are 55 tokens each; every prompt has a sentence of its own.
"""

from typing import Any

from attnscope.recipes.filler_profile import SLASHES, filler_experiment
from attnscope.recipes.recipe import Recipe
from attnscope.recipes.recipe_models import Models, labelled
from attnscope.spec.experiment import Experiment

HEADS = {
    "zoo:math-qwen2": 0,
    "zoo:chat-llama": 26,
    "zoo:chat-gemma3": 7,
    "Qwen/Qwen2.5-Math-7B": 0,
    "Qwen/Qwen2.5-Math-7B-Instruct": 0,
    "meta-llama/Llama-3.1-8B-Instruct": 26,
    "google/gemma-3-4b-it": 7,
}
"""The head shown of each model, from 0."""
MEASURES = ("profile", "uniformity", "value_similarity", "lambda", "uniform_slope", "spikes")


def filler_vs_sentence(
    models: Models = (
        "zoo:math-qwen2",
        "zoo:chat-llama",
        "zoo:chat-gemma3",
    ),
    prompts: int = 64,
    seed: int = 0,
    layers: Any = (0,),
    heads: Any = None,
    **keys: Any,
) -> Experiment:
    """Attention to 55 slashes against a random sentence of 55 tokens, in a head of each model."""
    # `layers` and `heads` are those whose profiles are kept; λ and the rest are of all heads.
    chosen = labelled(models)
    if heads is None:
        heads = {label: [HEADS.get(name, 0)] for label, name in chosen.items()}
    # Sentence n is drawn with seed + n; those of two seeds share none.
    sentence = {"kind": "sentence", "count": 55, "seed": seed * prompts}
    inserts = {"filler": SLASHES, "sentence": sentence}
    return filler_experiment(
        "filler-vs-sentence", chosen, (prompts, seed), inserts, layers, heads, MEASURES, keys
    )


RECIPE = Recipe(
    name="filler-vs-sentence",
    paper="arXiv 2510.01032",
    question="is attention more uniform over a filler than over words?",
    experiment=filler_vs_sentence,
    figures={"filler-vs-sentence": {}},
    claim_lines={
        "fall-beyond-sentence": (
            "lambda_ratio[condition=kind:repeat] <= 0.95 * "
            "lambda_ratio[condition=kind:sentence] in layer 0",
            "lambda_ratio[condition=kind:repeat] < lambda_ratio[condition=kind:sentence] in "
            "most heads of layer 0",
        ),
        "uniform-filler": (
            "uniformity[condition=kind:repeat] <= 0.95 * uniformity[condition=kind:sentence] "
            "in layer 0",
            "uniformity[condition=kind:repeat] < uniformity[condition=kind:sentence] in most "
            "heads of layer 0",
        ),
    },
)
