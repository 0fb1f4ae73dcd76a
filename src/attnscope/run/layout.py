"""The files of a run directory, and the check that they have the content that was written.

    experiment.yaml             the whole question
    environment.json            where it was measured, and an entry per model
    metadata.jsonl                 what is known of each prompt
    claims.yaml                 the claims of the run's own, if it was started with any
    plan.json                   the batches that belong to the run, in order
    prompts.*                   the file that the prompts came from, if they came from one
    images/DIGEST.*             the pictures of the prompts, by their digests
    image_tokens.jsonl          the tokens of each picture, and where in it they lie
    completions.parquet         completions and their scores, if the run is an evaluation
    cells/BATCH.TABLE.parquet   the cells of a batch: a file per table
    cells/BATCH.json            its index: the cells, and size and digest of each file; after them;
                                and the cells that could not be measured, with their errors
    manifest.json               the digests of all indices; last of all, so that it means complete

So every byte that is read was vouched for by what was written after it.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from attnscope.errors import InputError
from attnscope.paths import is_remote, open_file, read_file
from attnscope.run.schemas import CELLS, TABLES

FORMAT = 4
"""Of the directory and its tables. 1 had a file per cell, 2 no completions, 3 other column names
and `facts.jsonl`."""
LARGEST = 256 * 2**20
"""Bytes of a JSON file of a run; others are damaged."""
LARGEST_METADATA = 2**30
"""Bytes of `metadata.jsonl`."""
IMAGE_TOKENS = "image_tokens.jsonl"
"""The file with the tokens of every picture and their grids."""
SCORED = "completions.parquet"
"""The file of the table `completions`."""
LARGEST_SCORED = 4 * 2**30
"""Bytes of `completions.parquet`."""
_NAME = re.compile(rf"([0-9a-f]{{24}})\.(?:json|(?:{'|'.join(TABLES)})\.parquet)")


class DamageError(InputError):
    """A file of a run that is missing or does not have the content that was written."""

    code = "damaged-file"


@dataclass(frozen=True)
class StoredFile:
    """A table of a batch."""

    rows: int
    size: int
    digest: str


@dataclass(frozen=True)
class Failure:
    """A cell that could not be measured."""

    cell: str
    prompt: int
    condition: str
    error: str


@dataclass(frozen=True, eq=False)
class BatchIndex:
    """The cells that were measured together, and the files that hold them."""

    id: str
    cells: list[list[Any]]
    """Rows of the table `cells`."""
    files: dict[str, StoredFile]
    """By table."""
    failed: tuple[Failure, ...] = ()
    """Cells of the batch that are missing; a continued run tries them again."""
    parts: int = 1
    """In how many parts it was measured: more than one where it failed as a whole, as for want of
    memory. The last digits of a sum may depend on that."""
    elsewhere: dict[str, Any] = field(default_factory=dict)
    """What was different where it was measured from what `environment.json` says, if anything."""

    def file(self, folder: Path, table: str) -> Path:
        """Where a table of it is, in the run directory `folder`."""
        return folder / "cells" / f"{self.id}.{table}.parquet"

    def content(self) -> bytes:
        """What the index says, as it is written."""
        files = {name: [f.rows, f.size, f.digest] for name, f in self.files.items()}
        data_of_index: dict[str, Any] = {"files": files, "cells": self.cells}
        if self.parts != 1:
            data_of_index["parts"] = self.parts
        if self.elsewhere:
            data_of_index["elsewhere"] = self.elsewhere
        if self.failed:
            data_of_index["failed"] = [list(astuple(failure)) for failure in self.failed]
        return (json.dumps(data_of_index) + "\n").encode()

    def check(
        self, folder: Path, tables: Iterable[str] | None = None, *, check_content: bool
    ) -> None:
        """Check that files exist with their size, and with `check_content` their bytes."""
        for table in self.files if tables is None else tables:
            stored, path = self.files[table], self.file(folder, table)
            try:
                size = (path.stat() if is_remote(path) else path.lstat()).st_size
                same = size == stored.size and (
                    not check_content or digest_of(path) == stored.digest
                )
            except FileNotFoundError:
                raise DamageError(f"{path} is missing", path=str(path)) from None
            except OSError as error:
                raise DamageError(f"{path} cannot be read: {error}", path=str(path)) from error
            if not same:
                raise DamageError(
                    f"{path} does not have the content that was written", path=str(path)
                )


def read_index(folder: Path, id: str, digest: str | None = None) -> BatchIndex:
    """The index of a batch; compared with `digest`, if it is given."""
    path = folder / "cells" / f"{id}.json"
    try:
        content = read_file(path, LARGEST)
    except FileNotFoundError:
        raise DamageError(f"{path} is missing", path=str(path)) from None
    except OSError as error:
        raise DamageError(f"{path} cannot be read: {error}", path=str(path)) from error
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise DamageError(f"{path} does not have the content that was written", path=str(path))
    try:
        data = json.loads(content)
        files = {str(name): StoredFile(*about) for name, about in data["files"].items()}
        failed = tuple(Failure(*failure) for failure in data.get("failed", ()))
        other = dict(data.get("elsewhere", {}))
        index = BatchIndex(id, list(data["cells"]), files, failed, data.get("parts", 1), other)
        good = all(len(row) == len(CELLS) for row in index.cells) and set(files) <= set(TABLES)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamageError(
            f"{path} does not have the content that was written", path=str(path)
        ) from error
    if not good or not (index.cells or index.failed):
        raise DamageError(f"{path} does not have the content that was written", path=str(path))
    return index


def checked_index(folder: Path, id: str, digest: str | None = None) -> BatchIndex:
    """The index of a batch whose files are all what was written; else an error. With the `digest`
    that the manifest holds for the index, if there is one."""
    index = read_index(folder, id, digest)
    index.check(folder, check_content=True)
    return index


def digests_in_manifest(folder: Path, of: str) -> dict[str, str]:
    """The digests of `files` or `batches` in the manifest; empty without one, or if it is damaged:
    then nothing can be compared with it, and it is written again."""
    try:
        match = read_json(folder / "manifest.json").get(of)
    except DamageError:
        return {}
    return match if isinstance(match, dict) else {}


def batch_of(name: str) -> str | None:
    """The batch that a file in `cells` belongs to; None if it is no file of ours."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a run; empty where there is no such file."""
    try:
        data = json.loads(read_file(path, LARGEST))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DamageError(f"{path} is damaged: {error}", path=str(path)) from error
    if not isinstance(data, dict) or not data:
        raise DamageError(
            f"{path} is damaged: it is not a JSON object with content", path=str(path)
        )
    return data


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
