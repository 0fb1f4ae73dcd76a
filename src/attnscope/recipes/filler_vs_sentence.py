"""A filler against a random sentence of equal length (arXiv 2510.01032).

Three models, one head each: those of the paper where a model is one of the paper's, its first
otherwise. Both insertions go by ids, so that they are 55 tokens each; every prompt has a sentence
of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from attnscope.question.spec import Experiment, made
from attnscope.recipes.names import labelled, with_the_first_three

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


def filler_vs_sentence(
    models: Mapping[str, str] | Sequence[str] = (
        "zoo:math-qwen2",
        "zoo:chat-llama",
        "zoo:chat-gemma3",
    ),
    prompts: int = 64,
    layers: Any = (0,),
    heads: Any = None,
    **keys: Any,
) -> Experiment:
    """Attention to 55 slashes against a random sentence of 55 tokens: three models, a head each."""
    # `layers` and `heads` are those whose profiles are kept; λ and the rest are of all heads.
    chosen = labelled(models)
    if heads is None:
        heads = {label: [HEADS.get(name, 0)] for label, name in chosen.items()}
    place = {"position": "between", "by": "ids"}
    asked: dict[str, Any] = {
        "name": "filler-vs-sentence",
        "models": chosen,
        "prompts": {"source": "math", "count": prompts},
        "conditions": {
            "base": {},
            "filler": {"insert": {"kind": "repeat", "unit": "/", "count": 55}, **place},
            "sentence": {"insert": {"kind": "sentence", "count": 55}, **place},
        },
        "layers": with_the_first_three(layers),
        "profiles": {"layers": layers, "heads": heads},
        "queries": ["all"],
        "keys": ["all", "not-first"],
        "measures": [
            "profile",
            "uniformity",
            "value_similarity",
            "lambda",
            "even_slope",
            "spikes",
            "affine",
            "affine_heads",
            "mass",
            "entropy",
            "first_token",
        ],
    }
    return made(**{**asked, **keys})
