"""The run directories that the page can browse: those in one folder, by name."""

import math
import threading
from pathlib import Path
from typing import Any

from attnscope.errors import InputError, unknown
from attnscope.run.store import Run, open_run

ROWS = 1_000
"""How many rows of a query result are sent."""


class Runs:
    """The runs in a folder, or one run."""

    def __init__(self, folder: str | Path | None):
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None and not self._folder.is_dir():
            raise InputError(
                f"{str(self._folder)!r} is not a folder; give a run directory or a folder of runs",
                code="no-folder",
                path=str(self._folder),
            )
        self._building = threading.Lock()

    def names(self) -> dict[str, Path]:
        """All runs by name, newest first."""
        if self._folder is None:
            return {}
        if _is_run(self._folder):
            return {self._folder.resolve().name: self._folder}
        runs = [path for path in self._folder.glob("*") if _is_run(path)]
        runs += [path for path in self._folder.glob("*/*") if _is_run(path)]
        runs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        return {str(path.relative_to(self._folder)): path for path in runs}

    def open(self, name: str) -> Run:
        """Open a run by its name; a request never gives a path."""
        return open_run(self._path(name))

    def _path(self, name: str) -> Path:
        known = self.names()
        if name not in known:
            raise unknown("run", name, known)
        return known[name]

    def report(self, name: str) -> str:
        """The report of a run, built once for each state of its directory, one at a time.

        A `report.html` in the directory is not served: run directories come from other people,
        and their HTML is not checked.
        """
        from attnscope.report import report

        run = self.open(name)
        with self._building:
            return report(run)

    def about(self, name: str) -> dict[str, Any]:
        """The entry of a run in the list of runs."""
        run = self.open(name)
        return {
            "name": name,
            "experiment": run.experiment.name,
            "models": list(run.experiment.models),
            "conditions": list(run.experiment.conditions),
            "cells": run.cells.height,
        }

    def query(self, name: str, sql: str) -> dict[str, Any]:
        """The rows of an SQL query.

        Finite floats are sent as numbers. All else is sent as text, because JavaScript rounds
        large integers.
        """
        table = self.open(name).sql(sql)
        shown = table.head(ROWS)
        return {
            "columns": shown.columns,
            "rows": [[_sendable(v) for v in row] for row in shown.iter_rows()],
            "of": table.height,
        }


def _sendable(value: Any) -> float | str | None:
    if value is None or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _is_run(path: Path) -> bool:
    return (path / "experiment.yaml").is_file() and (path / "cells").is_dir()
