"""Writing a run directory so that it can stop at any moment and continue.

Every file is written under a temporary name and then renamed: a batch's tables, then its index,
and after all batches the manifest, so that what exists is complete. One process at a time: the
directory is locked while it is looked at and written.

This module must not know models or what the tables say. Reading is `store.py`.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.question.spec import Experiment, FilePrompts
from attnscope.question.yaml import read_experiment, written
from attnscope.run.layout import (
    FORMAT,
    BatchIndex,
    DamageError,
    StoredFile,
    batch_of,
    digest_of,
    read_index,
    read_json,
)
from attnscope.run.store import refuse_other_formats

__all__ = ["Directory", "opened"]

_TEMPORARY = ".attnscope.part"


@contextmanager
def opened(folder: Path, experiment: Experiment) -> Iterator[Directory]:
    """The run directory, made or continued, and locked. Refuses one of another experiment."""
    directory = Directory(folder)
    with directory.explained():
        _make(folder)
        with _locked(folder):
            directory.prepare(experiment)
            yield directory


class Directory:
    """A run directory being written."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.beside = ["environment.json", "facts.jsonl"]
        """Files that the manifest vouches for beside the batches."""

    def prepare(self, experiment: Experiment) -> None:
        """See that the directory is this experiment's, or nobody's yet."""
        asked = self.folder / "experiment.yaml"
        if asked.is_file():
            refuse_other_formats(self.folder)
            _same_experiment(self.folder, asked, experiment)
        elif any(not _ours(path) for path in self.folder.iterdir()):
            raise InputError(
                f"{self.folder} holds something that is not a run; give an empty or a new "
                "directory with --out"
            )
        for place in (self.folder, self.folder / "cells"):
            for path in place.glob(f"*{_TEMPORARY}"):  # what an interrupted write left behind
                path.unlink(missing_ok=True)
        (self.folder / "cells").mkdir(exist_ok=True)
        self.write("experiment.yaml", written(self._inside(experiment)).encode())

    def _inside(self, experiment: Experiment) -> Experiment:
        """The experiment with its prompts in the directory, so that nothing points outside."""
        prompts = experiment.prompts
        if not isinstance(prompts, FilePrompts):
            return experiment
        name = f"prompts{Path(prompts.path).suffix}"
        self.beside.append(name)
        self.write(name, Path(prompts.path).read_bytes())
        return experiment.changed(prompts=prompts.model_dump() | {"path": name})

    def batches(self) -> set[str]:
        """The batches that anything is there of."""
        with os.scandir(self.folder / "cells") as entries:
            return {id for entry in entries if (id := batch_of(entry.name)) is not None}

    def done(self, planned: Mapping[str, Sequence[str]]) -> set[str]:
        """Of the batches `planned`, with the tables each has, those that are there, undamaged."""
        done = set()
        for id, tables in planned.items():
            try:
                index = read_index(self.folder, id)
                index.check(self.folder, whole=True)
            except DamageError:
                continue
            if set(index.files) == set(tables):
                done.add(id)
        return done

    def environment(self) -> dict[str, Any]:
        """What is recorded so far; empty before anything is."""
        path = self.folder / "environment.json"
        try:
            found = read_json(path)
            whole = isinstance(found.get("models"), dict) and type(found.get("threads")) is int
            if found and not whole:
                raise DamageError(f"{path} is damaged: it lacks models or threads")
            return found
        except DamageError as error:
            raise InputError(
                f"{error}. It says where the cells were measured; delete it to measure them all "
                "again, or give another directory with --out"
            ) from error

    def write_json(self, name: str, content: Any) -> None:
        """A JSON file of the directory, whole or not at all."""
        self.write(name, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

    def write_lines(self, name: str, rows: Sequence[Any]) -> None:
        """A file with a line of JSON for each."""
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
        self.write(name, "".join(lines).encode("utf-8", "backslashreplace"))

    def write_batch(
        self, id: str, cells: list[list[Any]], tables: Mapping[str, pl.DataFrame]
    ) -> None:
        """A batch: its tables, then the index that says so."""
        files, contents = {}, {}
        for table, frame in tables.items():
            buffer = io.BytesIO()
            frame.write_parquet(buffer, compression="lz4", statistics=False)
            contents[table] = content = buffer.getvalue()
            digest = hashlib.sha256(content).hexdigest()
            files[table] = StoredFile(frame.height, len(content), digest)
        index = BatchIndex(id, cells, files)
        for table, content in contents.items():
            self.write(f"cells/{index.file(self.folder, table).name}", content)
        self.write(f"cells/{id}.json", index.content())

    def unfinish(self) -> None:
        """Something is missing: until it is there, the run is not complete."""
        (self.folder / "manifest.json").unlink(missing_ok=True)

    def finish(self, experiment: Experiment, batches: Sequence[str]) -> None:
        """Vouch for everything that was written."""
        manifest = {
            "format": FORMAT,
            "experiment": experiment.digest,
            "files": {name: digest_of(self.folder / name) for name in self.beside},
            "batches": {id: digest_of(self.folder / "cells" / f"{id}.json") for id in batches},
        }
        self.write_json("manifest.json", manifest)

    def write(self, name: str, content: bytes) -> None:
        """A file of the directory, whole or not at all."""
        path = self.folder / name
        if path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content:
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
            gone = error.errno == errno.ENOENT
            if error.errno not in _REASONS or (gone and self.folder.is_dir()):
                raise
            raise InputError(
                f"{_REASONS[error.errno].format(folder=self.folder)} ({error}). "
                f"Nothing is lost: {self._kept()} finished cells are kept there. Make room or give "
                "access, then start the same command again: it continues where it stopped; "
                "or choose another directory with --out"
            ) from error

    def _kept(self) -> int:
        try:
            found = [read_index(self.folder, id) for id in self.batches() if self._has_index(id)]
        except (OSError, DamageError):
            return 0
        return sum(len(index.cells) for index in found)

    def _has_index(self, id: str) -> bool:
        return (self.folder / "cells" / f"{id}.json").is_file()


_REASONS = {
    errno.ENOSPC: "the disk of {folder} is full",
    errno.EDQUOT: "the disk quota for {folder} is used up",
    errno.EACCES: "no permission to write in {folder}",
    errno.EPERM: "no permission to write in {folder}",
    errno.EROFS: "{folder} is on a read-only disk",
    errno.ENOTDIR: "{folder} cannot be made: part of its path is a file",
    errno.ENAMETOOLONG: "{folder} cannot be made: its name is too long",
    errno.ELOOP: "{folder} cannot be made: its path is a link that leads to itself",
    errno.ENOENT: "{folder} was moved or deleted while it was written",
}


def _make(folder: Path) -> None:
    if folder.is_symlink() and not folder.exists():
        raise InputError(f"{folder} is a link that leads nowhere; give a directory with --out")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a directory with --out")
    folder.mkdir(parents=True, exist_ok=True)


def _ours(path: Path) -> bool:
    """What may be there before the first file is: the rest of an interrupted beginning."""
    return (
        path.name.endswith(_TEMPORARY)
        or path.name.startswith("prompts.")
        or (path.name == "cells" and path.is_dir() and not any(path.iterdir()))
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
