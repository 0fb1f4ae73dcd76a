"""Writing a run directory so that it can stop at any moment and continue.

Every file is written under a temporary name and then renamed. A cell's values come after its other
tables, and the manifest after all cells, so that what exists is complete. One process at a time:
the directory is locked while it is written.

This module must not know models or what the tables say. Reading is `store.py`.
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.question.spec import Experiment
from attnscope.question.yaml import read_experiment, written
from attnscope.run.store import TABLES, cell_file

__all__ = ["Directory", "opened"]

_TEMPORARY = ".part"


@contextmanager
def opened(folder: Path, experiment: Experiment) -> Iterator[Directory]:
    """The run directory, made or continued, and locked. Refuses one of another experiment."""
    profiles = ("positions",) if "profile" in experiment.measures else ()
    directory = Directory(folder, ("values", "tokens", *profiles))
    with directory.explained():
        directory.prepare(experiment)
        with _locked(folder):
            directory.clean()
            directory.write("experiment.yaml", written(experiment).encode())
            yield directory


class Directory:
    """A run directory being written."""

    def __init__(self, folder: Path, tables: Iterable[str] = ("values", "tokens")):
        self.folder = folder
        self.parts = [TABLES[table] for table in tables]
        """What the names of a cell's files have behind its ID."""

    def prepare(self, experiment: Experiment) -> None:
        """Make the directory, or see that it is this experiment's."""
        folder = self.folder
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file; give a directory with --out")
        asked = folder / "experiment.yaml"
        if asked.is_file():
            _same_experiment(folder, asked, experiment)
        elif folder.is_dir() and any(not _ours(path) for path in folder.iterdir()):
            raise InputError(
                f"{folder} holds something that is not a run; give an empty or a new directory "
                "with --out"
            )
        (folder / "cells").mkdir(parents=True, exist_ok=True)

    def clean(self) -> None:
        """Remove what an interrupted write left behind."""
        for place in (self.folder, self.folder / "cells"):
            for path in place.glob(f"*{_TEMPORARY}"):
                path.unlink(missing_ok=True)

    def done(self) -> set[str]:
        """The cells that are complete: their values are there, and what comes before them."""
        with os.scandir(self.folder / "cells") as entries:
            names = {entry.name for entry in entries}
        ids = {name.removesuffix(".parquet") for name in names if name.count(".") == 1}
        return {id for id in ids if all(f"{id}{end}.parquet" in names for end in self.parts)}

    def environment(self) -> dict[str, Any]:
        """What is recorded so far; empty before anything is."""
        path = self.folder / "environment.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def write_json(self, name: str, content: Any) -> None:
        """A JSON file of the directory, whole or not at all."""
        self.write(name, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

    def write_cell(self, cell: str, tables: dict[str, pl.DataFrame]) -> None:
        """A cell's tables; the values last, whatever their order here."""
        for table in sorted(tables, key=lambda name: name == "values"):
            content = io.BytesIO()
            tables[table].write_parquet(content, compression="lz4", statistics=False)
            path = cell_file(self.folder, cell, table)
            self.write(str(path.relative_to(self.folder)), content.getvalue())

    def write(self, name: str, content: bytes) -> None:
        """A file of the directory, whole or not at all."""
        path = self.folder / name
        if path.exists() and path.stat().st_size == len(content) and path.read_bytes() == content:
            return
        temporary = path.with_name(path.name + _TEMPORARY)
        try:
            with temporary.open("wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What the disk refuses, said so that the user knows what is kept and how to go on."""
        try:
            yield
        except OSError as error:
            if error.errno not in _REASONS:
                raise
            kept = len(self.done()) if (self.folder / "cells").is_dir() else 0
            raise InputError(
                f"{_REASONS[error.errno].format(folder=self.folder)} ({error}). "
                f"Nothing is lost: {kept} finished cells are kept there. Make room or give access, "
                "then start the same command again: it continues where it stopped; "
                "or choose another directory with --out"
            ) from error


_REASONS = {
    errno.ENOSPC: "the disk of {folder} is full",
    errno.EDQUOT: "the disk quota for {folder} is used up",
    errno.EACCES: "no permission to write in {folder}",
    errno.EPERM: "no permission to write in {folder}",
    errno.EROFS: "{folder} is on a read-only disk",
    errno.ENOTDIR: "{folder} cannot be made: part of its path is a file",
}


def _ours(path: Path) -> bool:
    """What may be there before the first file is: the rest of an interrupted beginning."""
    return path.name.endswith(_TEMPORARY) or (
        path.name == "cells" and path.is_dir() and not any(path.iterdir())
    )


def _same_experiment(folder: Path, asked: Path, experiment: Experiment) -> None:
    there, mine = read_experiment(asked).measured(), experiment.measured()
    differing = [key for key in {**there, **mine} if there.get(key) != mine.get(key)]
    if differing:
        told = "; ".join(
            f"{key}: {there.get(key)} there, {mine.get(key)} here" for key in differing
        )
        raise InputError(
            f"{folder} holds another experiment, which differs in {', '.join(differing)} "
            f"({told}). Give another directory with --out, or run the one that is there: "
            f"attnscope run {asked} --out {folder}"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second process out. The lock goes with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another process is writing to {folder}; wait for it, or give another --out"
            ) from None
        yield
    finally:
        os.close(handle)
