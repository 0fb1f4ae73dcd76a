"""The scores of an evaluation: accuracy, pass@k, and differences from the base, by problem."""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from attnscope.errors import InputError
from attnscope.measures.measure import ANY, SHARE
from attnscope.run.schemas import REPEATS
from attnscope.stats.clusters import Floats
from attnscope.stats.families import false_discovery
from attnscope.stats.means import MINIMUM, one_sample, paired
from attnscope.stats.proportions import newcombe, wilson

if TYPE_CHECKING:
    from attnscope.run.store import Run

ATTENTION = ("entropy", "first_token")
"""The measures of attention that the table has as columns."""
_INTERVAL = ("score_low", "score_high")
_TESTED = ("difference", "low", "high", "p", "q")
Scores = dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]
"""By condition: one score per problem, in the same order."""


def pass_at(k: int, samples: int, right: int) -> float:
    """The unbiased estimate of pass@k: the probability that at least one of k completions, drawn
    without replacement from these samples, is right."""
    if not 1 <= k <= samples:
        raise InputError(
            f"pass@{k} needs at least {k} samples of every problem; there are {samples}",
            code="too-few-samples",
            k=k,
            samples=samples,
        )
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def score_table(run: Run, k: int = 1) -> pl.DataFrame:
    """One row per model, task, metric and condition: the mean score over problems with its
    interval, the difference from the base paired by problem, and the mean attention. Empty for a
    run without scores.

    With k = 1 the score of a problem is the mean over its samples, otherwise pass@k.
    """
    completions = run.completions
    if completions.is_empty():
        return pl.DataFrame()
    if REPEATS in run.prompts.columns:
        first = run.prompts.select("prompt", pl.col(REPEATS).cast(pl.Int32).alias("problem"))
        completions = completions.join(first, on="prompt", maintain_order="left")
    else:
        completions = completions.with_columns(problem="prompt")
    tables = [
        _of_metric(some, k, run.experiment.base).select(
            *(pl.lit(name).alias(column) for column, name in zip(_KEYS, names, strict=True)),
            pl.all(),
        )
        for names, some in completions.group_by(_KEYS, maintain_order=True)
    ]
    means = (
        run.values.filter(pl.col("measure").is_in(ATTENTION))
        .group_by("model", "condition", "measure")
        .agg(pl.col("value").mean())
        .collect()
        .pivot("measure", index=["model", "condition"], values="value")
    )
    return pl.concat(tables).join(
        means, on=["model", "condition"], how="left", maintain_order="left"
    )


_KEYS = ("model", "task", "metric")


def _of_metric(completions: pl.DataFrame, k: int, base: str) -> pl.DataFrame:
    """One row per condition; every condition has the same problems."""
    scores: Scores = {}
    totals: dict[str, float | None] = {}
    for (name,), mine in completions.group_by(["condition"], maintain_order=True):
        by_problem = mine.group_by("problem", maintain_order=True).agg("value").sort("problem")
        scores[str(name)] = np.array([_score(values, k) for values in by_problem["value"]])
        totals[str(name)] = mine["total"][0]
    table = compare_with_base(scores, base)
    if all(total is None for total in totals.values()):
        return table
    # The score is not a mean over documents, so paired differences do not apply to it.
    nothing = [pl.lit(None, pl.Float64).alias(name) for name in (*_INTERVAL, *_TESTED[1:])]
    of_base = totals[base]
    difference = [
        None if name == base or total is None or of_base is None else total - of_base
        for name, total in totals.items()
    ]
    return table.with_columns(
        pl.Series("score", list(totals.values()), pl.Float64),
        pl.Series("difference", difference, pl.Float64),
        *nothing,
    )


def _score(values: pl.Series, k: int) -> float:
    if k == 1:
        return float(np.mean(values.to_numpy()))
    return pass_at(k, len(values), int((values == 1).sum()))


def compare_with_base(scores: Scores, base: str) -> pl.DataFrame:
    """The table of conditions from their scores of the same problems."""
    others = [name for name in scores if name != base]
    contrast = {}
    if base in scores and others:
        first = np.stack([scores[base]] * len(others), 1)
        second = np.stack([scores[name] for name in others], 1)
        contrast = _contrast(first, second)
    rows = []
    for name, values in scores.items():
        row = {"condition": name, "problems": len(values), "score": float(values.mean())}
        row |= dict(zip(_INTERVAL, _interval(values), strict=True))
        for column in _TESTED:
            compared = name in others and contrast
            value = float(contrast[column][others.index(name)]) if compared else np.nan
            row[column] = None if np.isnan(value) else value
        rows.append(row)
    types = dict.fromkeys(("score", *_INTERVAL, *_TESTED), pl.Float64)
    return pl.DataFrame(rows, schema_overrides=types, infer_schema_length=None)


def _interval(values: Floats) -> tuple[float | None, float | None]:
    """The 95 % interval of a score: right or wrong by Wilson, else by t; none for few problems."""
    if len(values) < MINIMUM:
        return None, None
    if np.isin(values, (0, 1)).all():
        return wilson(values)
    share = values.min() >= 0 and values.max() <= 1
    low, high = one_sample(values, within=SHARE if share else ANY).interval()
    ends = [float(end[0]) for end in (low, high)]
    return (None, None) if np.isnan(ends).any() else (ends[0], ends[1])


def _contrast(first: Floats, second: Floats) -> dict[str, Floats]:
    """Differences of scores [problems, conditions]: right or wrong by Newcombe, else by t."""
    if np.isin(first, (0, 1)).all() and np.isin(second, (0, 1)).all() and len(first) >= MINIMUM:
        columns = newcombe(first, second)
    else:
        tested = paired(first, second).at(1.0)
        low, high = tested.interval()
        columns = {"difference": tested.estimate, "low": low, "high": high, "p": tested.two_sided()}
    return {**columns, "q": false_discovery(columns["p"], np.zeros(first.shape[1]))}
