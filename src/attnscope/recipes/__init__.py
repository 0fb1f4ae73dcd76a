"""Published results, one file each: experiment, figures, claims, and statistics.

A module of this package that declares `RECIPE` is a recipe; there is no list to edit.
`RECIPES["token-types"](prompts=1, queries=["last"])` is an `Experiment`.
"""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from attnscope.recipes.recipe import Recipe
from attnscope.spec.claims import Claim

__all__ = ["BUNDLED", "RECIPES", "Recipe", "built_in_claims", "recipe_table"]


def _declared() -> dict[str, Recipe]:
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    recipes = [module.RECIPE for module in modules if hasattr(module, "RECIPE")]
    return {recipe.name: recipe for recipe in recipes}


RECIPES: dict[str, Recipe] = _declared()
"""Name of a recipe → its declaration, in the order of the alphabet."""

BUNDLED = tuple(name for name, recipe in RECIPES.items() if recipe.bundled)
"""Recipes on the bundled tiny models that need no extra; `reproduce` without a name runs them."""


@cache
def built_in_claims() -> tuple[Claim, ...]:
    """The claims of all recipes. Those that a run can decide are judged on every run."""
    return tuple(claim for recipe in RECIPES.values() for claim in recipe.claims)


def recipe_table() -> str:
    """The table of docs/recipes/README.md."""
    rows = ["| recipe | question | paper |", "| --- | --- | --- |"]
    rows += [f"| [`{r.name}`]({r.name}.md) | {r.question} | {r.paper} |" for r in RECIPES.values()]
    return "\n".join(rows)
