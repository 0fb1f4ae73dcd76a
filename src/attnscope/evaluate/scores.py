"""From right and wrong answers to numbers: accuracy, pass@k, and differences paired by problem."""

from math import comb

import numpy as np
import polars as pl

from attnscope.errors import InputError
from attnscope.stats.contrast import ContrastSettings, paired_contrast

BASELINE = "baseline"


def pass_at(k: int, samples: int, right: int) -> float:
    """The chance that at least one of k answers, drawn from these without putting back, is right:
    unbiased."""
    if not 1 <= k <= samples:
        raise InputError(
            f"pass@{k} needs at least {k} samples of every problem; there are {samples}",
            code="too-few-samples",
            k=k,
            samples=samples,
        )
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def table(answers: pl.DataFrame, k: int = 1) -> pl.DataFrame:
    """A row for every condition: the score, and its difference from the baseline, by problem.

    `answers` has condition, problem, sample and right; every problem under every condition.
    """
    counted = answers.group_by("condition", "problem").agg(
        pl.len().alias("samples"), pl.col("right").sum()
    )
    conditions = answers["condition"].unique(maintain_order=True).to_list()
    wide: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    for name in conditions:
        mine = counted.filter(pl.col("condition") == name).sort("problem")
        wide[name] = np.array(
            [pass_at(k, n, right) for n, right in zip(mine["samples"], mine["right"], strict=True)]
        )
    return compared(wide)


def compared(wide: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]) -> pl.DataFrame:
    """The table of scores of the same problems under every condition."""
    rows = []
    others = [name for name in wide if name != BASELINE]
    found = {}
    if BASELINE in wide and others:
        first = np.stack([wide[BASELINE]] * len(others), 1)
        second = np.stack([wide[name] for name in others], 1)
        found = paired_contrast(
            first, second, np.zeros(len(others), dtype=np.int64), ContrastSettings()
        )
    for name, scores in wide.items():
        row = {"condition": name, "problems": len(scores), "score": float(scores.mean())}
        for figure in ("difference", "low", "high", "p", "q"):
            value = float(found[figure][others.index(name)]) if name in others and found else np.nan
            row[figure] = None if np.isnan(value) else value
        rows.append(row)
    return pl.DataFrame(rows, infer_schema_length=None)
