"""Complete experiments, one per published figure, on the bundled models or on the real ones.

A recipe is a function that returns an `Experiment`. Any key of the experiment can be changed:
`token_types(prompts=1, queries=["last"])`.
"""

from collections.abc import Callable
from importlib.resources import files
from typing import Any

from attnscope.recipes.drift import drift
from attnscope.recipes.filler_activations import filler_activations
from attnscope.recipes.filler_profile import filler_profile
from attnscope.recipes.filler_vs_sentence import filler_vs_sentence
from attnscope.recipes.induction import induction
from attnscope.recipes.injection import injection
from attnscope.recipes.lookback import lookback
from attnscope.recipes.needle import needle
from attnscope.recipes.position import position
from attnscope.recipes.recipe_models import SMOLLM2
from attnscope.recipes.sinks import sinks
from attnscope.recipes.token_types import token_types
from attnscope.spec.claims import Claim, load_claims
from attnscope.spec.experiment import Experiment

__all__ = [
    "BUNDLED",
    "FIGURES",
    "REAL",
    "RECIPES",
    "claims_of",
    "drift",
    "figures_of",
    "filler_activations",
    "filler_profile",
    "filler_vs_sentence",
    "induction",
    "injection",
    "lookback",
    "needle",
    "position",
    "sinks",
    "token_types",
]

RECIPES: dict[str, Callable[..., Experiment]] = {
    "token-types": token_types,
    "filler-profile": filler_profile,
    "filler-vs-sentence": filler_vs_sentence,
    "filler-activations": filler_activations,
    "sinks": sinks,
    "induction": induction,
    "lookback": lookback,
    "needle": needle,
    "drift": drift,
    "position": position,
    "injection": injection,
}

BUNDLED = ("token-types", "filler-profile", "filler-vs-sentence")
"""Recipes that run on the tiny models by default; the others run on zoo:smollm2."""

FIGURES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "sinks": [("head-map", {"measure": "first_token"})],
    "induction": [("head-map", {"measure": "induction"})],
    "lookback": [("steps", {}), ("head-map", {"measure": "lookback_per_token"})],
    "needle": [("needle-map", {"measure": "retrieval"}), ("head-map", {"measure": "retrieval"})],
    "drift": [("order", {})],
    "position": [("order", {})],
    "injection": [
        (
            "effect-heads",
            {"measure": "mass", "keys": "system", "conditions": ["harmless-1", "ignore-1"]},
        )
    ],
    "filler-activations": [("near-zero", {})],
}
"""The figures of a recipe, with their options; default: the figure of the same name."""

REAL = {**dict.fromkeys(RECIPES, SMOLLM2), "token-types": ("zoo:smollm2", "zoo:smollm2-phys")}
"""The real models of the zoo to run each recipe on, in place of the tiny ones."""


def figures_of(recipe: str) -> list[tuple[str, dict[str, Any]]]:
    """The figures of a recipe, with their options."""
    return FIGURES.get(recipe, [(recipe, {})])


def claims_of(recipe: str) -> tuple[Claim, ...]:
    """The claims of a recipe's paper that are not built in."""
    every = load_claims(str(files("attnscope.recipes") / "claims.yaml"))
    return tuple(c for c in every if c.name == recipe or c.name.startswith(f"{recipe}-"))
