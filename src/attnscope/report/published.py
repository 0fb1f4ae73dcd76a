"""Adds confidence intervals to the statistics that a recipe declares. They resample prompts."""

from dataclasses import dataclass

import numpy as np

from attnscope.recipes import RECIPES
from attnscope.recipes.recipe import Statistic
from attnscope.run.store import Run

RESAMPLES = 2000


@dataclass(frozen=True)
class PublishedStatistic:
    """A statistic with its interval and the published number."""

    what: str
    value: float
    low: float
    high: float
    n: int
    """Prompts."""
    published: str

    def __str__(self) -> str:
        beside = f" (published: {self.published})" if self.published else ""
        return f"{self.what}: {self.shown}, n = {self.n}{beside}"

    @property
    def shown(self) -> str:
        """The value and its interval."""
        interval = f" [{self.low:.3g}, {self.high:.3g}]" if self.low == self.low else ""
        return f"{self.value:.3g}{interval}"


def published_statistics(run: Run) -> list[PublishedStatistic]:
    """The statistics of a recipe's run, which has the name of the recipe; empty for other runs."""
    recipe = RECIPES.get(run.experiment.name)
    if recipe is None or recipe.statistics is None:
        return []
    return [_with_interval(statistic) for statistic in recipe.statistics(run)]


def _with_interval(statistic: Statistic) -> PublishedStatistic:
    """The statistic and its 95 % percentile interval; nan below 6 prompts."""
    table, low, high = statistic.table, float("nan"), float("nan")
    if len(table) >= 6:
        picks = np.random.default_rng(0).integers(0, len(table), (RESAMPLES, len(table)))
        low, high = np.quantile([statistic.of(table[pick]) for pick in picks], [0.025, 0.975])
    value = statistic.of(table)
    return PublishedStatistic(
        statistic.what, value, float(low), float(high), len(table), statistic.published
    )
