"""Reads the values of a run as tables of prompts by heads or by positions, for statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from attnscope.errors import InputError
from attnscope.recipes.recipe import Statistic

if TYPE_CHECKING:
    from attnscope.run.store import Run

Floats = NDArray[np.float64]


def by_head(
    run: Run, measure: str, column: str = "value", **where: Any
) -> tuple[Floats, list[int]]:
    """[prompts, heads] of a measure, and which prompts; a prompt without a value is left out.
    The column `uniform` has the value under uniform attention."""
    rows = _rows(run, measure, **where).sort("layer", "head")
    wide = rows.pivot(["layer", "head"], index="prompt", values=column).sort("prompt")
    table = wide.drop("prompt").to_numpy().astype(np.float64)
    good = ~np.isnan(table).any(axis=1)
    return table[good], [p for p, kept in zip(wide["prompt"], good, strict=True) if kept]


def by_layer(run: Run, measure: str, **where: Any) -> Floats:
    """[prompts, layers] of a measure, mean over heads; prompts without a value are left out."""
    rows = _rows(run, measure, **where).group_by("prompt", "layer").agg(pl.col("value").mean())
    wide = rows.sort("layer").pivot("layer", index="prompt", values="value").sort("prompt")
    return wide.drop("prompt").drop_nulls().to_numpy().astype(np.float64)


def mean(table: Floats) -> float:
    """The mean of a table."""
    return float(table.mean())


def share_above(threshold: float) -> Callable[[Floats], float]:
    """The share of heads whose mean over prompts is above a threshold."""
    return lambda table: float((table.mean(axis=0) > threshold).mean())


def lift_table(run: Run, model: str, axis: str) -> Floats:
    """[prompts, positions]: mass over that of uniform attention, by `queries` or `keys`."""
    rows = _rows(run, "mass", model=model)
    lift = rows.group_by("prompt", axis).agg(
        (pl.col("value").mean() / pl.col("uniform").mean()).alias("lift")
    )
    wide = lift.pivot(axis, index="prompt", values="lift").sort("prompt")
    positions = list(getattr(run.experiment, axis))
    return wide.select(positions).drop_nulls().to_numpy().astype(np.float64)


def lift_of_ends(run: Run, model: str, axis: str) -> Iterator[Statistic]:
    """The lift of the first and of the last position (uniform attention gives 1)."""
    table, positions = lift_table(run, model, axis), list(getattr(run.experiment, axis))
    for column in (0, -1):
        what = f"{model}: lift of {positions[column]}"
        yield Statistic(what, table[:, [column]], mean)


def _rows(run: Run, measure: str, **where: Any) -> pl.DataFrame:
    rows = run.values.filter(pl.col("measure") == measure).filter(**where).collect()
    if rows.is_empty() and measure not in run.experiment.measures:
        raise InputError(
            f"the run has no values of {measure}, which the statistics of its recipe need",
            code="missing-measure",
            measure=measure,
        )
    return rows
