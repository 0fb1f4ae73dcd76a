"""Run directories that a page can browse: those in one folder, by their names."""

import math
from pathlib import Path
from typing import Any

from attnscope.errors import InputError, unknown
from attnscope.run.store import Run, open_run

ROWS = 1_000
"""How many rows of a query are shown."""


class Runs:
    """The runs in a folder, or one run."""

    def __init__(self, folder: str | Path | None):
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None and not self._folder.is_dir():
            raise InputError(f"{str(self._folder)!r} is not a folder")

    def names(self) -> dict[str, Path]:
        """Every run by its name, newest first."""
        if self._folder is None:
            return {}
        if _is_run(self._folder):
            return {self._folder.resolve().name: self._folder}
        found = [path for path in self._folder.glob("*") if _is_run(path)]
        found += [path for path in self._folder.glob("*/*") if _is_run(path)]
        found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        return {str(path.relative_to(self._folder)): path for path in found}

    def open(self, name: str) -> Run:
        """One of them; never a path that was sent."""
        known = self.names()
        if name not in known:
            raise unknown("run", name, known)
        return open_run(known[name])

    def about(self, name: str) -> dict[str, Any]:
        """What a list of runs shows."""
        run = self.open(name)
        return {
            "name": name,
            "experiment": run.experiment.name,
            "models": list(run.experiment.models),
            "conditions": list(run.experiment.conditions),
            "cells": run.cells.height,
        }

    def query(self, name: str, sql: str) -> dict[str, Any]:
        """The rows of a query: broken numbers as numbers, all else as text, which loses no digit
        of a large whole one."""
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
