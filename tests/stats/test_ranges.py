"""Intervals of levels stay within the possible values of a measure."""

import math
from typing import Any

import numpy as np
import polars as pl
import pytest

from attnscope.figures import draw
from attnscope.figures.head_types import classify_heads
from attnscope.figures.summary import summary
from attnscope.measures.registry import COLUMNS, range_of
from attnscope.run.tables import possible
from made_runs import made_run
from made_values import measured

ANYTHING = {
    *("spike_fall", "affine_lambda", "affine_heads_lambda", "max_logit", "next_token_logprob"),
    *("rerank_score", "receiver_kurtosis"),
}
"""Columns that may have any value."""


def test_every_column_declares_its_range() -> None:
    without = {name for name in COLUMNS if range_of(name) == (-math.inf, math.inf)}
    assert without == ANYTHING


@pytest.mark.parametrize(
    ("measure", "normalise", "heads", "within"),
    [
        ("mass", "mass", "mean", (0, 1)),
        ("mass", "share", "max", (0, 1)),
        ("mass", "lift", "mean", (0, math.inf)),
        ("mass", "mass", "sum", (0, math.inf)),
        ("entropy", "lift", "mean", (0, math.inf)),
        ("affine_r2", "mass", "mean", (-math.inf, 1)),
    ],
)
def test_what_is_possible(measure: str, normalise: str, heads: str, within: Any) -> None:
    assert possible(measure, normalise, heads) == within


def rarely(model: str, prompt: int, *_: Any) -> float:
    """0 in most prompts and large in one: the interval of the mean reaches below 0."""
    return 0.9 if prompt == 0 else 0.01 * (prompt % 2)


def test_an_interval_ends_at_the_possible_values() -> None:
    table = measured("first_token", rarely)
    free = summary(table, ["layer", "head"])
    assert (free["low"] < 0).all()
    held = summary(table, ["layer", "head"], within=possible("first_token"))
    assert held["low"].to_list() == [0.0] * 6
    assert held["mean"].equals(free["mean"])
    assert held["high"].equals(free["high"])


def test_a_figure_has_no_interval_below_0() -> None:
    run = made_run(models=("m",), prompts=12, layers=(0,), heads=2, measures=("first_token",))
    sparse = pl.when(pl.col("prompt") == 0).then(0.9).otherwise(0.01 * (pl.col("prompt") % 2))
    object.__setattr__(run, "values", run.values.with_columns(value=sparse))
    assert draw(run, "depth").data["low"].to_list() == [0.0]


def test_scores_of_heads_are_shares() -> None:
    values = [0.9, *(0.01 * (n % 2) for n in range(11))]
    scores = pl.DataFrame(
        {
            "score": ["retrieval"] * 12,
            "item": pl.Series([None] * 12, dtype=pl.String),
            "prompt": range(12),
            "layer": [0] * 12,
            "head": [0] * 12,
            "value": values,
        }
    )
    row = classify_heads(scores).row(0, named=True)
    assert row["retrieval"] == pytest.approx(np.mean(values))
    assert row["retrieval_low"] == 0.0
    assert row["retrieval_high"] <= 1.0
