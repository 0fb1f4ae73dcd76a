"""Writing a run directory so that it can stop at any moment and continue.

Every file is written under a temporary name and then renamed: a batch's tables, then its index,
and after all batches the manifest, so that what exists is complete. The directory is locked while
it is looked at and written, by one process, or by several that each measure batches of their own
(shards): what they all write is the same for all, or is read and written by one at a time.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.paths import UNFINISHED, read_file, write_file
from attnscope.run.folder_checks import check_same, inside, make_folder, may_precede_a_run
from attnscope.run.layout import (
    FORMAT,
    IMAGE_TOKENS,
    SCORED,
    BatchIndex,
    DamageError,
    Failure,
    StoredFile,
    batch_of,
    checked_index,
    digest_of,
    digests_in_manifest,
    read_index,
    read_json,
)
from attnscope.run.locks import locked, locked_briefly
from attnscope.run.store import refuse_other_formats
from attnscope.spec.claims import Claim, to_yaml
from attnscope.spec.experiment import Experiment
from attnscope.spec.experiment_yaml import experiment_to_yaml, read_experiment


@contextmanager
def open_directory(
    folder: Path,
    experiment: Experiment,
    *,
    shared: bool = False,
    prompts: bytes | None = None,
    old: Experiment | None = None,
) -> Iterator[Directory]:
    """The run directory, made or continued, and locked: for one, or `shared` by several that
    write different batches. Refuses one of another experiment, but for `old`, which the experiment
    extends. `prompts` is the content of a prompt file that is not on disk."""
    directory = Directory(folder, prompts, old)
    with directory.explain_disk_errors():
        make_folder(folder)
        with locked(folder, shared=shared):
            directory.prepare(experiment, shared=shared)
            yield directory


class Directory:
    """A run directory being written."""

    def __init__(self, folder: Path, prompts: bytes | None = None, old: Experiment | None = None):
        self.folder = folder
        self.prompts = prompts
        self.old = old
        self.beside = ["environment.json", "metadata.jsonl", "plan.json"]
        """Files that the manifest vouches for beside the batches."""

    def prepare(self, experiment: Experiment, *, shared: bool = False) -> None:
        """Check that the directory is empty or belongs to this experiment."""
        experiment_file = self.folder / "experiment.yaml"
        other_files = not experiment_file.is_file() and any(
            not may_precede_a_run(path) for path in inside(self.folder)
        )
        if experiment_file.is_file():  # checked again: another shard may have started
            refuse_other_formats(self.folder)
            stored = read_experiment(experiment_file)
            if self.old is not None and stored.digest == self.old.digest:
                self.remove_manifest()  # what it vouches for is replaced now
            else:
                check_same(self.folder, experiment_file, stored, experiment)
        elif other_files:
            raise InputError(
                f"{self.folder} holds files that are not of a run; give an empty or a new "
                "directory with --out",
                code="not-a-run",
                folder=str(self.folder),
            )
        if not shared:
            self._clear()
        (self.folder / "cells").mkdir(exist_ok=True)
        self.write("experiment.yaml", experiment_to_yaml(self._inside(experiment)).encode())

    def _clear(self) -> None:
        """Delete temporary files of interrupted writes; no other process may be writing."""
        for folder in (self.folder, self.folder / "cells"):
            for path in folder.glob(f"*{UNFINISHED}"):
                path.unlink(missing_ok=True)

    def locked_alone(self) -> AbstractContextManager[None]:
        """A lock that one process at a time holds, among those that share the directory."""
        return locked_briefly(self.folder / "cells")

    def _inside(self, experiment: Experiment) -> Experiment:
        """The experiment with its prompts in the directory, so that nothing points outside."""
        prompts = experiment.prompts
        path = getattr(prompts, "path", None)
        if self.prompts is not None:
            name, content = "prompts.jsonl", self.prompts
        elif path is not None:
            name, content = f"prompts{Path(path).suffix}", Path(path).read_bytes()
        else:
            return experiment
        self.beside.append(name)
        self.write(name, content)
        return experiment.with_keys(prompts=prompts.model_dump() | {"path": name})

    def batches(self) -> set[str]:
        """The batches that anything is there of."""
        names = (path.name for path in inside(self.folder / "cells"))
        return {id for name in names if (id := batch_of(name)) is not None}

    def done(self, planned: Mapping[str, Sequence[str]]) -> set[str]:
        """Of the batches `planned`, with the tables each has, those that are there, undamaged."""
        done = set()
        digests = digests_in_manifest(self.folder, "batches")
        for id, tables in planned.items():
            try:
                index = checked_index(self.folder, id, digests.get(id))
            except DamageError:
                continue
            if set(index.files) == set(tables) and not index.failed:
                done.add(id)
        return done

    def environment(self) -> dict[str, Any]:
        """What is recorded so far; empty before anything is."""
        path = self.folder / "environment.json"
        try:
            environment = read_json(path)
            valid = (
                isinstance(environment.get("models"), dict)
                and type(environment.get("threads")) is int
            )
            if environment and not valid:
                raise DamageError(
                    f"{path} is damaged: the key models or threads is missing", path=str(path)
                )
            if environment and self.as_written(path.name) is False:
                raise DamageError(
                    f"{path} does not have the digest that manifest.json holds for it",
                    path=str(path),
                )
            return environment
        except DamageError as error:
            raise InputError(
                f"{error}. It says where the cells were measured; put a copy of it back, delete it "
                "to measure them all again, or give another directory with --out",
                code="damaged-environment",
            ) from error

    def as_written(self, name: str) -> bool | None:
        """Whether a file has the digest that the manifest holds; None where it holds none."""
        digest = digests_in_manifest(self.folder, "files").get(name)
        if digest is None:
            return None
        try:
            return digest_of(self.folder / name) == digest
        except (OSError, ValueError):
            return False

    def write_json(self, name: str, content: Any) -> None:
        """A JSON file of the directory, whole or not at all."""
        self.write(name, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

    def write_lines(self, name: str, rows: Sequence[Any]) -> None:
        """A file with a line of JSON for each."""
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
        self.write(name, "".join(lines).encode("utf-8", "backslashreplace"))

    def write_batch(
        self,
        id: str,
        cells: list[list[Any]],
        tables: Mapping[str, pl.DataFrame],
        *,
        failed: Sequence[Failure] = (),
        parts: int = 1,
        elsewhere: Mapping[str, Any] | None = None,
    ) -> None:
        """A batch: its tables, then the index that says so."""
        files, contents = {}, {}
        for table, frame in tables.items():
            contents[table] = content = _parquet(frame)
            digest = hashlib.sha256(content).hexdigest()
            files[table] = StoredFile(frame.height, len(content), digest)
        index = BatchIndex(id, cells, files, tuple(failed), parts, dict(elsewhere or {}))
        for table, content in contents.items():
            self.write(f"cells/{index.file(self.folder, table).name}", content)
        self.write(f"cells/{id}.json", index.content())

    def keep_claims(self, claims: Sequence[Claim]) -> None:
        """Store the claims that the run starts with, and no others."""
        if claims:
            self.write("claims.yaml", to_yaml(claims).encode())
        else:
            (self.folder / "claims.yaml").unlink(missing_ok=True)

    def keep_picture(self, name: str, content: Callable[[], bytes]) -> None:
        """Store the file of a picture, unless it is there."""
        (self.folder / name).parent.mkdir(exist_ok=True)
        digest = Path(name).stem
        try:
            stored = digest_of(self.folder / name) == digest
        except (OSError, ValueError):
            stored = False
        if not stored:
            self.write(name, content())
        self.beside.append(name)

    def keep_image_tokens(self, rows: Sequence[Any]) -> None:
        """Store which tokens each picture has, and where in the picture they lie."""
        self.write_lines(IMAGE_TOKENS, rows)
        self.beside.append(IMAGE_TOKENS)

    def has_claims(self) -> bool:
        """Whether the run was started with its own claims."""
        return (self.folder / "claims.yaml").is_file()

    def write_completions(self, completions: pl.DataFrame) -> None:
        """Store the table of an evaluation; the next manifest vouches for it."""
        self.write(SCORED, _parquet(completions))
        self.beside = [*dict.fromkeys([*self.beside, SCORED])]

    def drop_damaged(self) -> None:
        """Delete the indices that differ from the manifest. Without the manifest, a run that is
        stopped and continued would accept them."""
        with self.locked_alone():
            for id, digest in digests_in_manifest(self.folder, "batches").items():
                try:
                    read_index(self.folder, id, digest)
                except DamageError:
                    path = self.folder / "cells" / f"{id}.json"
                    if batch_of(path.name) is not None and path.is_file():
                        path.unlink()

    def remove_batch(self, id: str) -> None:
        """Delete the files of a batch: its index first, so that it is never there in part."""
        names = (path.name for path in inside(self.folder / "cells"))
        files = [name for name in names if batch_of(name) == id]
        for name in sorted(files, key=lambda name: not name.endswith(".json")):
            (self.folder / "cells" / name).unlink(missing_ok=True)

    def remove_manifest(self) -> None:
        """Something is missing: until it is there, the run is not complete."""
        (self.folder / "manifest.json").unlink(missing_ok=True)

    def write_plan(self, batches: Sequence[str]) -> None:
        """Which batches belong to the run, in order: known before any is there."""
        self.write_json("plan.json", {"batches": list(batches)})

    def finish(self, experiment: Experiment, batches: Sequence[str]) -> None:
        """Vouch for everything that was written."""
        with self.locked_alone():
            self._clear()  # a shard that still writes would write the same bytes
            self.write_plan(batches)
            files = [*self.beside, *(["claims.yaml"] if self.has_claims() else [])]
            if SCORED not in files and self.as_written(SCORED):
                files.append(SCORED)
            manifest = {
                "format": FORMAT,
                "experiment": experiment.digest,
                "files": {name: digest_of(self.folder / name) for name in files},
                "batches": {id: digest_of(self.folder / "cells" / f"{id}.json") for id in batches},
            }
            self.write_json("manifest.json", manifest)

    def has_index(self, id: str) -> bool:
        """Whether a batch was written, damaged since or not."""
        return (self.folder / "cells" / f"{id}.json").is_file()

    def write(self, name: str, content: bytes) -> None:
        """A file of the directory, whole or not at all."""
        path = self.folder / name
        if _holds(path, content):
            return
        try:
            write_file(path, content)
        except OSError:
            if not _holds(path, content):  # otherwise another process wrote the same
                raise

    @contextmanager
    def explain_disk_errors(self) -> Iterator[None]:
        """Turn errors of the disk into messages that state what is kept and how to continue."""
        try:
            yield
        except OSError as error:
            gone = error.errno == errno.ENOENT
            if error.errno not in _REASONS or (gone and self.folder.is_dir()):
                raise
            code, reason = _REASONS[error.errno]
            raise InputError(
                f"{reason.format(folder=self.folder)} ({error}). "
                f"{self._finished_cells()} finished cells are kept there. Free space or give "
                "access, then run the same command again: it continues with the next batch. "
                "Or choose another directory with --out",
                code=code,
                folder=str(self.folder),
                errno=error.errno,
            ) from error

    def _finished_cells(self) -> int:
        try:
            indices = [read_index(self.folder, id) for id in self.batches() if self.has_index(id)]
        except (OSError, DamageError):
            return 0
        return sum(len(index.cells) for index in indices)


def _parquet(frame: pl.DataFrame) -> bytes:
    """A table as a file. Row groups would follow how the frame was put together: in one piece, the
    bytes follow from its content."""
    buffer = io.BytesIO()
    frame.rechunk().write_parquet(buffer, compression="lz4", statistics=False)
    return buffer.getvalue()


def _holds(path: Path, content: bytes) -> bool:
    try:
        same_size = path.is_file() and path.stat().st_size == len(content)
        return same_size and read_file(path, len(content)) == content
    except OSError:  # a link, or gone since
        return False


_REASONS = {
    errno.ENOSPC: ("disk-full", "the disk of {folder} is full"),
    errno.EDQUOT: ("disk-full", "the disk quota for {folder} is used up"),
    errno.EREMOTEIO: ("write-failed", "{folder} did not accept what was written"),
    errno.EACCES: ("no-permission", "no permission to write in {folder}"),
    errno.EPERM: ("no-permission", "no permission to write in {folder}"),
    errno.EROFS: ("no-permission", "{folder} is on a read-only disk"),
    errno.ENOTDIR: ("not-a-directory", "{folder} cannot be made: part of its path is a file"),
    errno.ENAMETOOLONG: ("bad-path", "{folder} cannot be made: its name is too long"),
    errno.ELOOP: ("bad-path", "{folder} cannot be made: its path is a link that leads to itself"),
    errno.ENOENT: ("folder-missing", "{folder} was moved or deleted while the run wrote to it"),
}
