"""Declares what a recipe is: experiment, figures, claims, and statistics beside published ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attnscope.recipes.recipe_models import SMOLLM2, Models
from attnscope.spec.claims import Claim, make_claims
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from attnscope.run.store import Run


@dataclass(frozen=True)
class Statistic:
    """A number of a run, beside a published one. `attnscope.stats` adds the confidence interval."""

    what: str
    table: NDArray[np.float64]
    """One row per prompt; intervals resample the rows."""
    of: Callable[[NDArray[np.float64]], float]
    """From such a table to the number."""
    published: str = ""
    """The published number, with its model."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published result: how to measure it, draw it and judge it.

    `recipe(prompts=8, models=["zoo:chat-llama"])` is its experiment; every key can be changed.
    """

    name: str
    """The name in `attnscope reproduce NAME`, and of the experiment."""
    paper: str
    question: str
    """What the paper asks, for the table of recipes."""
    experiment: Callable[..., Experiment]
    """Makes the experiment. The first line of its docstring is printed by `reproduce`."""
    figures: Mapping[str, Mapping[str, Any]]
    """Name of a figure → the options that show what the paper shows."""
    statistics: Callable[[Run], Iterable[Statistic]] | None = None
    """From a run to the statistics of the paper."""
    claim_lines: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a claim of the paper → its lines; docs/claims.md has the grammar."""
    real: Models = field(default=SMOLLM2)
    """The models of `reproduce --real`."""
    extra: str = ""
    """The optional part of attnscope that it needs, such as `vision`. `reproduce` without a name
    runs no such recipe."""

    def __call__(self, *args: Any, **keys: Any) -> Experiment:
        """The experiment, with changes to its keys."""
        return self.experiment(*args, **keys)

    @property
    def description(self) -> str:
        """What is measured, in one sentence."""
        return (inspect.getdoc(self.experiment) or "").partition("\n")[0]

    @cached_property
    def claims(self) -> tuple[Claim, ...]:
        """The claims of the paper."""
        if not self.claim_lines:
            return ()
        return make_claims(self.claim_lines, f"the recipe {self.name}")

    @property
    def models(self) -> Models:
        """The default models."""
        default: Models = inspect.signature(self.experiment).parameters["models"].default
        return default

    @property
    def bundled(self) -> bool:
        """Whether attnscope and attnscope-zoo have all that it needs; else it is downloaded."""
        from attnscope import zoo

        if self.extra:
            return False
        names = list(self.models.values() if isinstance(self.models, Mapping) else self.models)
        return all(name.removeprefix(zoo.PREFIX) not in zoo.FETCHED for name in names)
