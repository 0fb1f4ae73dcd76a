"""Prepares the table of values for tests: combines heads, normalises masses, builds a matrix
[prompts, columns].
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from attnscope.errors import InputError, unknown
from attnscope.measures.measure import Range
from attnscope.measures.registry import range_of
from attnscope.spec.claims import NORMALISE

IDENTITY = (
    *("model", "condition", "queries", "keys", "classes"),
    *("layer", "head", "measure", "item", "target"),
)
"""Columns that identify a value, besides its prompt."""
HELD = 2_500_000
"""Rows of a table whose heads are combined at once."""
COMBINE = ("mean", "sum", "max", "each")

Values = pl.DataFrame | pl.LazyFrame


def combine(values: Values, how: str = "mean") -> pl.DataFrame:
    """Heads to one number per prompt and layer, by "mean", "sum" or "max"; "each" leaves them.

    A layer with an undefined head is undefined (null): a mean over the others would be another
    quantity in every prompt. Numbers of the whole layer (no head) stay as they are.
    """
    if how not in COMBINE:
        raise unknown("way to combine heads", how, COMBINE)
    if how != "each" and isinstance(values, pl.LazyFrame) and len(parts := _parts(values)) > 1:
        return pl.concat([combine(part.collect(), how) for part in parts])
    # The error of a sampled number varies from prompt to prompt with the number: it is in the
    # spread over prompts already, and adding it would count it twice.
    table = values.lazy().drop("error", strict=False).collect()
    if how == "each" or table.is_empty():
        return table
    without_head = table.filter(pl.col("head").is_null())
    table = table.filter(pl.col("head").is_not_null())

    def together(column: str) -> pl.Expr:
        amount: pl.Expr = getattr(pl.col(column), how)()
        return pl.when(pl.col(column).null_count() == 0).then(amount).alias(column)

    by = ["prompt", *(c for c in IDENTITY if c != "head")]
    table = table.with_columns(pl.col("value", "uniform").fill_nan(None))
    combined = table.group_by(by, maintain_order=True).agg(
        together("value"),
        together("uniform"),
        pl.col("tokens").max(),  # the same in every head
        pl.lit(None, dtype=without_head.schema["head"]).alias("head"),
        (pl.len() > pl.col("head").n_unique()).alias("twice"),
    )
    if combined["twice"].any():
        _refuse_duplicates(table, [*by, "head"])
    return pl.concat([combined.select(without_head.columns), without_head])


def _refuse_duplicates(table: pl.DataFrame, by: Sequence[str]) -> None:
    """Refuse a duplicate row, because it would count twice."""
    twice = table.filter(table.select(by).is_duplicated()).select(by).row(0, named=True)
    raise InputError(
        "the table has two rows for the same value: "
        f"{', '.join(f'{k} {v!r}' for k, v in twice.items() if v is not None)}; "
        "remove one of them before heads are combined",
        code="duplicate-row",
        row=twice,
    )


def _parts(values: pl.LazyFrame) -> list[pl.LazyFrame]:
    """A table that is too long for memory, in parts of some models each."""
    rows = values.select(pl.len()).collect().item()
    if rows <= HELD:
        return [values]
    models = values.select(pl.col("model").unique().sort()).collect()["model"].to_list()
    together = max(1, len(models) * HELD // rows)
    return [
        values.filter(pl.col("model").is_in(models[start : start + together]))
        for start in range(0, len(models), together)
    ]


def normalise(values: Values, how: str = "mass") -> pl.DataFrame:
    """Masses as "mass", "per-token", "share" (of the classes in this table) or "lift".

    Other measures stay as they are. After `combine`, so that a share is a share of the bars shown.
    """
    if how not in NORMALISE:
        raise unknown("normalisation", how, NORMALISE)
    table = values.lazy().collect()
    if how == "mass":
        return table
    over = {
        "per-token": pl.col("tokens"),
        "lift": pl.col("uniform"),
        "share": pl.col("value").sum().over(["prompt", *(c for c in IDENTITY if c != "item")]),
    }[how]
    value = pl.when(pl.col("measure") != "mass").then(pl.col("value"))
    return table.with_columns(value.when(over > 0).then(pl.col("value") / over).alias("value"))


def possible(measure: str, normalise: str = "mass", heads: str = "mean") -> Range:
    """The possible values of a measure, normalised and with its heads combined."""
    low, high = range_of(measure)
    if heads == "sum":
        return (0.0 if low >= 0 else -math.inf), (0.0 if high <= 0 else math.inf)
    unbounded = measure == "mass" and normalise in ("lift", "per-token")
    return low, (math.inf if unbounded else high)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Values as a matrix: a row per prompt, a column per thing measured."""

    columns: pl.DataFrame
    """What each column is."""
    prompts: list[int]
    x: NDArray[np.float64]
    """[prompts, columns]; nan where there is no value."""


def matrix(values: Values, by: Sequence[str], prompts: Iterable[int] | None = None) -> Matrix:
    """Values with one row per prompt and one column per combination of `by`.

    More than one value for a prompt and column is an error: the prompt is the unit.
    """
    table = values.lazy().select("prompt", *by, "value").collect()
    columns = table.select(by).unique().sort(by)
    rows = sorted(table["prompt"].unique()) if prompts is None else sorted(prompts)
    numbered = columns.with_row_index("column")
    table = table.join(numbered, on=list(by), how="left", nulls_equal=True)
    at = np.searchsorted(np.array(rows), table["prompt"].to_numpy()) if rows else np.array([], int)
    where = at * columns.height + table["column"].to_numpy().astype(np.int64)
    size = len(rows) * columns.height
    if size and np.bincount(where, minlength=size).max() > 1:
        first = columns.row(int(np.bincount(where).argmax() % columns.height), named=True)
        raise InputError(
            "a prompt has several values in one column: "
            f"{', '.join(f'{k} {v!r}' for k, v in first.items() if v is not None)}; "
            "combine the heads first, or add the column in which they differ to `by`",
            code="several-values-per-prompt",
            column=first,
        )
    x = np.full(size, np.nan)
    x[where] = table["value"].fill_null(np.nan).to_numpy()
    return Matrix(columns, rows, x.reshape(len(rows), columns.height))


def ranges(numbers: Iterable[int], shortest: int = 2) -> str:
    """Integers as ranges, for example `0–3, 16`; shorter runs than `shortest` are listed singly."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]}–{run[-1]}" if len(run) >= shortest else ", ".join(map(str, run)) for run in runs
    )
