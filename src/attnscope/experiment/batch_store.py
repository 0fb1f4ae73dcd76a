"""Step 4 of a batch: from numbers to tables, and into the run directory.

All cells of a condition have the same rows but for the numbers in them, so the words are put
together once per batch and shared. Every batch has its own files, so a worker on another machine
can write it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from attnscope.experiment.cells import Cell
from attnscope.experiment.executor import Done
from attnscope.experiment.plan import ModelPlan
from attnscope.experiment.results import Column, Measured, QueryValues
from attnscope.run.layout import Failure
from attnscope.run.schemas import BY_QUERY, CELLS, POSITIONS, TOKENS, VALUES
from attnscope.run.writer import Directory
from attnscope.spec.experiment import Experiment
from attnscope.tokens import read_vocabulary

Rows = NDArray[np.int64]
Table = tuple[pl.DataFrame, Rows]
"""The rows of some cells, one after the other, and how many each has."""
OF_LEVEL = {"token": "positions", "query": "by_query"}
"""The table that measures of a level have of their own."""
_NUMBERS = ("value", "uniform", "tokens", "error")
"""The columns of `values` that a reading has."""


class BatchStore:
    """Writes batches of an experiment to its directory."""

    def __init__(
        self,
        experiment: Experiment,
        directory: Directory,
        elsewhere: dict[str, Any] | None = None,
    ):
        self.experiment = experiment
        self.directory = directory
        self.elsewhere = elsewhere or {}
        """How this environment differs from the one in which the run started."""
        self._columns: tuple[ModelPlan, TokenColumns] | None = None  # of the model before

    def __call__(self, done: Done) -> None:
        """Write a batch."""
        batch = done.work.batch
        measured = [cell for cell in batch.by_prompt() if cell.prompt not in done.failed]
        failed = [cell for cell in batch.by_prompt() if cell.prompt in done.failed]
        as_measured = {
            cell.id: cell
            for part in done.parts
            for of_condition in part.measured.values()
            for cell in of_condition.cells
        }
        self.directory.write_batch(
            batch.id,
            [_row(done, as_measured.get(cell.id, cell)) for cell in measured],
            self._tables(done, measured),
            failed=[
                Failure(cell.id, cell.prompt, cell.condition, done.failed[cell.prompt])
                for cell in failed
            ],
            parts=max(1, len(done.parts)),
            elsewhere=self.elsewhere,
        )

    def _tables(self, done: Done, cells: list[Cell]) -> dict[str, pl.DataFrame]:
        """The tables of a batch, cell after cell."""
        columns, label = self._of_model(done.work.model), done.work.model.label
        stored: list[str] = []
        parts: dict[str, list[Table]] = {}
        for part in done.parts:
            for condition, its in part.batch.cells.items():
                measured = part.measured[condition]
                ordered, tables = condition_tables(label, measured.cells or its, measured, columns)
                stored += [cell.id for cell in ordered]
                for name, table in tables.items():
                    parts.setdefault(name, []).append(table)
        index_of = {id: n for n, id in enumerate(stored)}
        order = np.array([index_of[cell.id] for cell in cells], dtype=np.int64)
        return {name: _in_order(tables_of_name, order) for name, tables_of_name in parts.items()}

    def _of_model(self, model: ModelPlan) -> TokenColumns:
        if self._columns is None or self._columns[0] is not model:
            self._columns = model, TokenColumns(self.experiment, model)
        return self._columns[1]


def _in_order(tables: list[Table], order: NDArray[np.int64]) -> pl.DataFrame:
    """Cell after cell, as `order` has them."""
    frame = pl.concat([rows for rows, _ in tables])
    if (order[1:] > order[:-1]).all():
        return frame
    count = np.concatenate([counts for _, counts in tables])
    start = np.cumsum(count) - count
    return frame[np.concatenate([np.arange(start[n], start[n] + count[n]) for n in order])]


def _row(done: Done, cell: Cell) -> list[Any]:
    """The row of the table `cells`."""
    pair = cell.alignment
    row = {
        "cell": cell.id,
        "model": done.work.model.label,
        "prompt": cell.prompt,
        "condition": cell.condition,
        "tokens": len(cell.tokens),
        "filler_tokens": 0 if pair is None else len(pair.filler),
        "boundary_tokens": 0 if pair is None else len(pair.variant_boundary),
        "base_boundary_tokens": 0 if pair is None else len(pair.base_boundary),
        "generated_tokens": 0 if cell.completion is None else len(cell.completion.ids),
        "generated": None if cell.completion is None else cell.completion.text,
    }
    return [row[name] for name in CELLS]


def value_table(label: str, cells: Sequence[Cell], measured: Measured, order: Rows) -> Table:
    """The `values` of the cells of a condition."""
    words: list[pl.DataFrame] = []
    flat: dict[str, list[NDArray[np.float64]]] = {name: [] for name in _NUMBERS}
    for reading in measured.readings:
        words.append(_words(reading.queries, tuple(reading.heads), tuple(reading.columns)))
        for parts, arrays in zip(flat.values(), zip(*reading.numbers, strict=True), strict=True):
            parts.append(np.concatenate(arrays, axis=2).reshape(len(cells), -1))
    if not words:
        return VALUES.to_frame(), np.zeros(len(cells), dtype=np.int64)
    of_cell = pl.concat(words) if len(words) > 1 else words[0]
    texts = {column.name: column for column in pl.concat([of_cell] * len(cells)).get_columns()}
    rows = np.full(len(cells), len(of_cell))
    numbers = {
        name: pl.Series(np.concatenate(parts, axis=1)[order].ravel(), nan_to_null=True)
        for name, parts in flat.items()
    }
    return _frame(
        VALUES, texts | _cell_columns(label, [cells[n] for n in order], rows) | numbers
    ), rows


def _frame(schema: pl.Schema, columns: dict[str, Any]) -> pl.DataFrame:
    """The columns in the order of the schema; they have its types already."""
    return pl.DataFrame([pl.Series(name, columns[name]) for name in schema.names()])


def _cell_columns(label: str, cells: Sequence[Cell], rows: Rows) -> dict[str, Any]:
    """The first three columns of every table, for cells of one condition with so many rows each."""
    total = int(rows.sum())
    return {
        "model": _repeated(label, total),
        "prompt": np.repeat(np.array([cell.prompt for cell in cells], dtype=np.int32), rows),
        "condition": _repeated(cells[0].condition, total),
    }


def _repeated(text: str, n: int) -> pl.Series:
    return pl.Series([text], dtype=pl.String).new_from_index(0, n)


@lru_cache(maxsize=16)
def _words(
    queries: str, heads: tuple[tuple[int | None, int | None], ...], columns: tuple[Column, ...]
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


def position_table(label: str, cells: Sequence[Cell], measured: Measured, order: Rows) -> Table:
    """The `positions` of the cells of a condition, where profiles were asked for."""
    parts = [_positions(label, cells[n], n, measured) for n in order.tolist()]
    return pl.concat(parts), np.array([part.height for part in parts])


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
            name: pl.Series(array[row, :, :n].ravel(), nan_to_null=True)
            for name, array in profiled.items()
        }
        parts.append(
            _frame(POSITIONS, _cell_columns(label, [cell], np.array([n * len(heads)])) | columns)
        )
    return pl.concat(parts)


def query_table(label: str, cells: Sequence[Cell], measured: Measured, order: Rows) -> Table:
    """The `by_query` of the cells of a condition: of every series, head by head, its bins one after
    the other."""
    parts = [
        pl.concat([_of_series(label, cells[n], n, one) for one in measured.series])
        for n in order.tolist()
    ]
    return pl.concat(parts), np.array([part.height for part in parts])


def _of_series(label: str, cell: Cell, row: int, series: QueryValues) -> pl.DataFrame:
    has_value = series.positions[row] >= 0
    S, N, C = len(series.heads), int(has_value.sum()), len(series.columns)
    layers, heads = np.array(series.heads, dtype=np.int16).reshape(-1, 2).T
    words = {
        name: [getattr(column, name) for column in series.columns]
        for name in ("keys", "classes", "measure", "item")
    }
    each = np.tile(np.arange(C), S * N)
    columns: dict[str, Any] = {
        "queries": _repeated(series.queries, S * N * C),
        **{name: pl.Series(texts, dtype=pl.String)[each] for name, texts in words.items()},
        "layer": np.repeat(layers, N * C),
        "head": np.repeat(heads, N * C),
        "position": np.tile(np.repeat(series.positions[row, has_value], C), S).astype(np.int32),
        "count": np.tile(np.repeat(series.counts[row, has_value], C), S).astype(np.int32),
        "value": pl.Series(series.value[row][:, has_value].ravel(), nan_to_null=True),
    }
    return _frame(BY_QUERY, _cell_columns(label, [cell], np.array([S * N * C])) | columns)


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
        self._classes: Any = next(iter(experiment.classes.values()))
        self._tokenizer = plan.tokenizer
        self._names = pl.Series([*self._classes.names, None], dtype=pl.String)

    def classes(self, texts: Sequence[NDArray[np.int64]]) -> pl.Series:
        """The class of every token of these texts, one after the other."""
        numbers = [self._classes.main_class(ids, self._tokenizer) for ids in texts]
        flat = np.concatenate(numbers)
        return self._names[np.where(flat < 0, len(self._names) - 1, flat)]


def token_table(label: str, cells: Sequence[Cell], vocabulary: TokenColumns) -> Table:
    """The `tokens` of the cells of a condition."""
    rows = np.array([len(cell.tokens) for cell in cells])
    ids = np.concatenate([cell.tokens.ids for cell in cells])
    position = np.arange(len(ids)) - np.repeat(np.cumsum(rows) - rows, rows)
    role, aligned = _roles_and_alignment(cells, rows, position)
    columns = {
        "position": position.astype(np.int32),
        "id": ids.astype(np.int32),
        "text": vocabulary.texts[ids],
        "class": vocabulary.classes([cell.tokens.ids for cell in cells]),
        "regions": _regions(cells, rows),
        "role": _ROLES[role],
        "aligned_position": pl.Series(
            np.where(aligned < 0, np.nan, aligned), nan_to_null=True
        ).cast(pl.Int32),
    }
    return _frame(TOKENS, _cell_columns(label, cells, rows) | columns), rows


_ROLES = pl.Series(["text", "filler", "boundary", "generated"])


def _roles_and_alignment(cells: Sequence[Cell], rows: Rows, position: Rows) -> tuple[Rows, Rows]:
    """Of each token: the number of its role, and its aligned position, -1 for none."""
    role, aligned = np.zeros(len(position), dtype=np.int64), position.copy()
    for cell, end, n in zip(cells, np.cumsum(rows).tolist(), rows.tolist(), strict=True):
        roles_of_cell, aligned_of_cell = role[end - n : end], aligned[end - n : end]
        if cell.alignment is not None:
            roles_of_cell[cell.alignment.filler] = 1
            roles_of_cell[cell.alignment.variant_boundary] = 2
            aligned_of_cell[:] = -1
            aligned_of_cell[cell.alignment.variant] = cell.alignment.base
        if cell.completion is not None:  # all but its last token was fed back
            generated = slice(n - len(cell.completion.ids) + 1, n)
            roles_of_cell[generated], aligned_of_cell[generated] = 3, -1
    return role, aligned


def _regions(cells: Sequence[Cell], rows: Rows) -> pl.Series:
    """The names of each token's regions, as lists; equal ones are made once."""
    regions = [cell.tokens.prompt.regions for cell in cells]
    spans = np.zeros((len(cells), max(map(len, regions)), 2), dtype=np.int64)
    for n, of_one in enumerate(regions):
        for m, region in enumerate(of_one):
            spans[n, m] = region.start, region.end
    offsets = np.concatenate([cell.tokens.offsets for cell in cells])
    of_cell = np.repeat(np.arange(len(cells)), rows)
    inside = np.stack(
        [
            np.minimum(offsets[:, 1], end) > np.maximum(offsets[:, 0], start)
            for start, end in spans[of_cell].transpose(1, 2, 0)
        ]
        or [np.zeros(len(of_cell), dtype=bool)],
        axis=1,
    )
    # Regions are spans, so that what a token is in changes a few times in a text.
    changes = (inside[1:] != inside[:-1]).any(axis=1) | (of_cell[1:] != of_cell[:-1])
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
    named = [tuple(region.name for region in of_one) for of_one in regions]
    known: dict[tuple[tuple[str, ...], bytes], int] = {}
    lists: list[list[str]] = []
    numbers = []
    for start, cell in zip(starts.tolist(), of_cell[starts].tolist(), strict=True):
        key = named[cell], inside[start].tobytes()
        if key not in known:
            known[key] = len(lists)
            present = set(compress(named[cell], inside[start]))
            lists.append([name for name in dict.fromkeys(named[cell]) if name in present])
        numbers.append(known[key])
    which = np.repeat(numbers, np.diff([*starts, len(of_cell)]))
    return pl.Series(lists, dtype=pl.List(pl.String))[which]


def condition_tables(
    label: str, cells: Sequence[Cell], measured: Measured, vocabulary: TokenColumns
) -> tuple[list[Cell], dict[str, Table]]:
    """Every table of the cells of a condition, in the order of their prompts."""
    order = np.argsort([cell.prompt for cell in cells], kind="stable")
    ordered = [cells[n] for n in order.tolist()]
    tables = {
        "tokens": token_table(label, ordered, vocabulary),
        "values": value_table(label, cells, measured, order),
    }
    if measured.profiles:
        tables["positions"] = position_table(label, cells, measured, order)
    if measured.series:
        tables["by_query"] = query_table(label, cells, measured, order)
    return ordered, tables
