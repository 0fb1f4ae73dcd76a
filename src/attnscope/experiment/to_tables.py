"""From arrays to tables: the rows of a batch's cells, built a column at a time.

All cells of a condition have the same rows but for the numbers in them, so the words are put
together once per batch and shared.

This module must not know models, attention or files.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from attnscope.experiment.cells import Cell
from attnscope.experiment.measured import Column, Measured
from attnscope.experiment.plan import ModelPlan
from attnscope.question.spec import Experiment
from attnscope.run.schemas import POSITIONS, TOKENS, VALUES
from attnscope.tokens import read_vocabulary

_NUMBERS = ("value", "uniform", "tokens", "error")
"""The columns of `values` that a reading has."""


def value_tables(label: str, cells: tuple[Cell, ...], measured: Measured) -> list[pl.DataFrame]:
    """The `values` of each cell of a condition."""
    words: list[pl.DataFrame] = []
    flat: dict[str, list[NDArray[np.float64]]] = {name: [] for name in _NUMBERS}
    for reading in measured.readings:
        words.append(_words(reading.queries, tuple(reading.heads), tuple(reading.columns)))
        for name, parts in flat.items():
            together = np.concatenate(getattr(reading, name), axis=2)
            parts.append(together.reshape(len(cells), -1))
    if not words:
        return [VALUES.to_frame() for _ in cells]
    frame = pl.concat(words) if len(words) > 1 else words[0]
    numbers = {name: np.concatenate(parts, axis=1) for name, parts in flat.items()}
    said = {column.name: column for column in frame.get_columns()}
    return [
        _frame(
            VALUES,
            said
            | _whose(label, cell, len(frame))
            | {name: pl.Series(found[row], nan_to_null=True) for name, found in numbers.items()},
        )
        for row, cell in enumerate(cells)
    ]


def _frame(schema: pl.Schema, columns: dict[str, Any]) -> pl.DataFrame:
    """The columns in the order of the schema; they have its types already."""
    return pl.DataFrame([pl.Series(name, columns[name]) for name in schema.names()])


def _whose(label: str, cell: Cell, n: int) -> dict[str, Any]:
    """The first three columns of every table."""
    return {
        "model": _repeated(label, n),
        "prompt": np.full(n, cell.prompt, dtype=np.int32),
        "condition": _repeated(cell.condition, n),
    }


def _repeated(text: str, n: int) -> pl.Series:
    """The text n times, cut from a longer column that is kept."""
    return _long(text, 1 << (n - 1).bit_length() if n else 1).head(n)


@lru_cache(maxsize=64)
def _long(text: str, n: int) -> pl.Series:
    return pl.repeat(text, n, dtype=pl.String, eager=True)


@lru_cache(maxsize=16)
def _words(
    queries: str, heads: tuple[tuple[int, int | None], ...], columns: tuple[Column, ...]
) -> pl.DataFrame:
    """What the rows of a reading say, apart from whose they are and their numbers."""
    S, C = len(heads), len(columns)
    of_head = pl.DataFrame(
        {"layer": [layer for layer, _ in heads], "head": [head for _, head in heads]},
        schema={"layer": VALUES["layer"], "head": VALUES["head"]},
    )
    names = ("keys", "classes", "measure", "item", "target")
    of_column = pl.DataFrame(columns, schema={name: VALUES[name] for name in names}, orient="row")
    return pl.concat(
        [
            of_head[np.repeat(np.arange(S), C)],
            of_column[np.tile(np.arange(C), S)],
        ],
        how="horizontal",
    ).with_columns(pl.lit(queries, pl.String).alias("queries"))


def position_tables(
    label: str, cells: tuple[Cell, ...], measured: Measured
) -> list[pl.DataFrame] | None:
    """The `positions` of each cell of a condition; None where no profile was asked for."""
    if not measured.profiles:
        return None
    return [_positions(label, cell, row, measured) for row, cell in enumerate(cells)]


def _positions(label: str, cell: Cell, row: int, measured: Measured) -> pl.DataFrame:
    n = len(cell.tokens)
    parts = []
    for queries, (heads, profiled) in measured.profiles.items():
        layers, numbers = np.array(heads, dtype=np.int16).reshape(-1, 2).T
        columns: dict[str, Any] = {
            "queries": _repeated(queries, n * len(heads)),
            "layer": np.repeat(layers, n),
            "head": np.repeat(numbers, n),
            "position": np.tile(np.arange(n, dtype=np.int32), len(heads)),
        } | {
            name: pl.Series(found[row, :, :n].ravel(), nan_to_null=True)
            for name, found in profiled.items()
        }
        parts.append(_frame(POSITIONS, _whose(label, cell, n * len(heads)) | columns))
    return pl.concat(parts)


class TokenColumns:
    """What every id says and is, as columns to take rows from."""

    def __init__(self, experiment: Experiment, plan: ModelPlan):
        vocabulary = read_vocabulary(plan.tokenizer)
        names = plan.tokenizer.convert_ids_to_tokens(list(range(len(vocabulary))))
        # A special token has no text; its name says what it is.
        self.texts = pl.Series(
            [text or name or "" for text, name in zip(vocabulary.texts, names, strict=True)],
            dtype=pl.String,
        )
        first: Any = next(iter(experiment.classes.values()))
        table = first.table(plan.tokenizer)
        names = [*table.names, None]  # -1, no class, is the last
        self.classes = pl.Series([names[c] for c in table.classes.tolist()], dtype=pl.String)


def token_table(label: str, cell: Cell, vocabulary: TokenColumns) -> pl.DataFrame:
    """The `tokens` of a cell."""
    n = len(cell.tokens)
    role: NDArray[np.int64] = np.zeros(n, dtype=np.int64)
    twin: NDArray[np.int64] = np.arange(n)
    if cell.alignment is not None:
        role[cell.alignment.filler] = 1
        role[cell.alignment.variant_seam] = 2
        twin = np.full(n, -1)
        twin[cell.alignment.variant] = cell.alignment.base
    if cell.answer is not None:  # all but its last token was fed back
        generated = slice(n - len(cell.answer.ids) + 1, n)
        role[generated], twin[generated] = 3, -1
    columns = {
        "position": np.arange(n, dtype=np.int32),
        "id": cell.tokens.ids.astype(np.int32),
        "text": vocabulary.texts[cell.tokens.ids],
        "class": vocabulary.classes[cell.tokens.ids],
        "regions": _regions(cell),
        "role": _ROLES[role],
        "twin": pl.Series(np.where(twin < 0, np.nan, twin), nan_to_null=True).cast(pl.Int32),
    }
    return _frame(TOKENS, _whose(label, cell, n) | columns)


_ROLES = pl.Series(["text", "filler", "seam", "generated"])


def _regions(cell: Cell) -> pl.Series:
    """The names of each token's regions, as lists; equal ones are made once."""
    names = cell.tokens.prompt.names
    inside = np.stack([cell.tokens.mask(name) for name in names], 1) if names else None
    if inside is None:
        return pl.Series([[]] * len(cell.tokens), dtype=pl.List(pl.String))
    kinds, which = np.unique(inside, axis=0, return_inverse=True)
    lists = [[name for name, there in zip(names, kind, strict=True) if there] for kind in kinds]
    return pl.Series(lists, dtype=pl.List(pl.String))[which.ravel()]


def cell_tables(
    label: str, cells: tuple[Cell, ...], measured: Measured, vocabulary: TokenColumns
) -> Iterator[tuple[Cell, dict[str, pl.DataFrame]]]:
    """Every table of every cell of a condition."""
    positions = position_tables(label, cells, measured)
    for row, (cell, values) in enumerate(
        zip(cells, value_tables(label, cells, measured), strict=True)
    ):
        tables = {"tokens": token_table(label, cell, vocabulary), "values": values}
        if positions is not None:
            tables["positions"] = positions[row]
        yield cell, tables
