"""Complete experiments, one per published figure, on the bundled models or on the real ones.

A recipe is a function that gives an `Experiment`. Any key of the experiment can be given in place
of the recipe's own: `token_types(prompts=1, queries=["last"])`.

This room must not know how experiments are run or drawn.
"""

from collections.abc import Callable

from attnscope.question.spec import Experiment
from attnscope.recipes.filler_profile import filler_profile
from attnscope.recipes.filler_vs_sentence import filler_vs_sentence
from attnscope.recipes.token_types import token_types

__all__ = ["REAL", "RECIPES", "filler_profile", "filler_vs_sentence", "token_types"]

RECIPES: dict[str, Callable[..., Experiment]] = {
    "token-types": token_types,
    "filler-profile": filler_profile,
    "filler-vs-sentence": filler_vs_sentence,
}

REAL = {
    "token-types": ("zoo:smollm2", "zoo:smollm2-phys"),
    "filler-profile": ("zoo:smollm2",),
    "filler-vs-sentence": ("zoo:smollm2",),
}
"""The real models of the zoo to run each recipe on, in place of the tiny ones."""
