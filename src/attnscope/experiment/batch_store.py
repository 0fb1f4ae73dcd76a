"""Writes a measured batch to the run directory: tables, cells and failures.

Every batch has its own files, so a worker on another machine can write it too.
"""

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from attnscope.experiment.cells import Cell
from attnscope.experiment.executor import Done
from attnscope.experiment.plan import ModelPlan
from attnscope.experiment.to_tables import Table, TokenColumns, condition_tables
from attnscope.run.layout import Failure
from attnscope.run.schemas import CELLS
from attnscope.run.writer import Directory
from attnscope.spec.experiment import Experiment


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
