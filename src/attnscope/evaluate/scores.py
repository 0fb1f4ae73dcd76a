"""From right and wrong completions to accuracy, pass@k, and differences paired by problem."""

from math import comb

import numpy as np
import polars as pl

from attnscope.errors import InputError
from attnscope.stats.contrast import ContrastSettings, paired_contrast

BASELINE = "baseline"
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


def table(completions: pl.DataFrame, k: int = 1) -> pl.DataFrame:
    """One row per condition: its score, and the difference from the baseline paired by problem.

    `completions` has the columns condition, problem, sample and right; every condition must have
    every problem.
    """
    counted = completions.group_by("condition", "problem").agg(
        pl.len().alias("samples"), pl.col("right").sum()
    )
    scores: Scores = {}
    for name in completions["condition"].unique(maintain_order=True).to_list():
        mine = counted.filter(pl.col("condition") == name).sort("problem")
        scores[name] = np.array(
            [pass_at(k, n, right) for n, right in zip(mine["samples"], mine["right"], strict=True)]
        )
    return compare_with_baseline(scores)


def compare_with_baseline(scores: Scores) -> pl.DataFrame:
    """The table of conditions from their scores of the same problems."""
    rows = []
    others = [name for name in scores if name != BASELINE]
    contrast = {}
    if BASELINE in scores and others:
        first = np.stack([scores[BASELINE]] * len(others), 1)
        second = np.stack([scores[name] for name in others], 1)
        contrast = paired_contrast(
            first, second, np.zeros(len(others), dtype=np.int64), ContrastSettings()
        )
    for name, values in scores.items():
        row = {"condition": name, "problems": len(values), "score": float(values.mean())}
        for column in ("difference", "low", "high", "p", "q"):
            compared = name in others and contrast
            value = float(contrast[column][others.index(name)]) if compared else np.nan
            row[column] = None if np.isnan(value) else value
        rows.append(row)
    return pl.DataFrame(rows, infer_schema_length=None)
