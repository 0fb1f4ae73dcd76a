"""The experiments of a card: two on its own fixed texts, and those that score heads."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

from attnscope.recipes.heads import head_experiments
from attnscope.recipes.recipe_models import label_of
from attnscope.spec.experiment import Experiment, make_experiment
from attnscope.yaml_file import parse_yaml

NEW_TOKENS = 24
"""Length of a completion."""
HEAD_PROMPTS = 8
"""Prompts for each score of a head type."""


@cache
def texts() -> tuple[dict[str, str], ...]:
    """The fixed texts: `name`, `start` and `rest`."""
    content = files("attnscope.card").joinpath("texts.yaml").read_text(encoding="utf-8")
    records, _ = parse_yaml(content, "texts.yaml")
    return tuple(records)


def digest_of_texts() -> str:
    """SHA-256 of the fixed texts. Two cards can be compared if they are equal."""
    return hashlib.sha256(json.dumps(texts(), sort_keys=True).encode()).hexdigest()


def card_experiments(
    model: str, *, bos: bool = False, device: str | None = None, dtype: str = "auto"
) -> dict[str, Experiment]:
    """The experiments by name: `text`, `completion`, and those of `head_experiments`."""
    where: dict[str, Any] = {"bos": bos, "device": device, "dtype": dtype}
    common: dict[str, Any] = {"models": {label_of(model): model}, "chat": False, **where}
    return {
        "text": make_experiment(
            name="card-text",
            prompts=_prompts("{start}{rest}"),
            keys=["not-first"],
            measures=[
                *("mass", "first_token", "learned_sink_mass", "entropy", "distance"),
                "residual",
            ],
            **common,
        ),
        "completion": make_experiment(
            name="card-completion",
            prompts=_prompts("{start}"),
            generate={"max_new_tokens": NEW_TOKENS},
            queries=["generated"],
            keys=["all", "generated"],
            classes=["whole"],
            measures=["mass", "first_token", "self_mass"],
            **common,
        ),
        **head_experiments(model, prompts=HEAD_PROMPTS, **where),
    }


def _prompts(template: str) -> dict[str, Any]:
    return {"source": "inline", "records": list(texts()), "template": template}
