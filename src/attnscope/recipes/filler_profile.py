"""Average attention weight per token, without and with a filler (arXiv 2510.01032).

One model, its first layer, the heads that the paper calls 1, 2 and 8: here 0, 1 and 7. 55 slashes
go between system prompt and question, by ids, so that they are 55 tokens and nothing else changes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from attnscope.experiment.spec import Experiment, made
from attnscope.recipes.names import labelled

__all__ = ["filler_profile"]


def filler_profile(
    models: Mapping[str, str] | Sequence[str] = ("zoo:math-qwen2",),
    prompts: int = 64,
    **keys: Any,
) -> Experiment:
    """Average attention weight per token in the first layer, without and with 55 slashes."""
    asked: dict[str, Any] = {
        "name": "filler-profile",
        "models": labelled(models),
        "prompts": {"source": "math", "count": prompts},
        "conditions": {
            "base": {},
            "filler": {
                "insert": {"kind": "repeat", "unit": "/", "count": 55},
                "position": "between",
                "by": "ids",
            },
        },
        "layers": [0],
        "heads": [0, 1, 7],
        "queries": ["all"],
        # Some models put most of their attention on the first token, which would decide a slope.
        "keys": ["all", "not-first"],
        "measures": [
            "profile",
            "lambda",
            "uniformity",
            "value_similarity",
            "affine",
            "mass",
            "entropy",
            "first_token",
        ],
    }
    return made(**{**asked, **keys})
