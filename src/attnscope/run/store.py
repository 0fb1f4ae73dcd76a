"""Reading a run: `open_run` gives its tables as polars frames, and SQL over them.

Every file is compared with the digest that was stored when it was written; damaged files are
refused. Reading needs no torch. Writing is `writer.py`.
"""

import atexit
import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.paths import is_remote, read_file, to_path
from attnscope.run.layout import (
    FORMAT,
    IMAGE_TOKENS,
    LARGEST_METADATA,
    LARGEST_SCORED,
    SCORED,
    BatchIndex,
    DamageError,
    Failure,
    batch_of,
    digest_of,
    digests_in_manifest,
    read_index,
    read_json,
)
from attnscope.run.schemas import CELLS, COMPLETIONS, QUERIED, TABLES
from attnscope.run.sql import check_query
from attnscope.spec.claims import Claim, load_claims
from attnscope.spec.experiment import Experiment
from attnscope.spec.experiment_yaml import read_experiment

HELD = 4_000_000
"""Tables of up to so many rows are read once and held, in the order of models, prompts and
conditions; of longer ones, only what is asked for is read, in any order."""


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A run directory, read. The frames are lazy: ask, then `collect()`."""

    path: Path
    experiment: Experiment
    """What was asked, every default written out."""
    environment: dict[str, Any]
    """Versions, device, and an entry per model."""
    complete: bool
    """Whether every cell is there. What is there can be read in any case."""
    batches: tuple[BatchIndex, ...]
    """What is there, by the batches it was measured in."""

    def __repr__(self) -> str:
        finished = "" if self.complete else ", not finished"
        cells = sum(len(batch.cells) for batch in self.batches)
        return f"<Run {self.experiment.name} in {self.path}: {cells} cells{finished}>"

    @cached_property
    def values(self) -> pl.LazyFrame:
        """One row per number."""
        return self._table("values")

    @cached_property
    def tokens(self) -> pl.LazyFrame:
        """One row per token of a prompt."""
        return self._table("tokens")

    @cached_property
    def positions(self) -> pl.LazyFrame:
        """One row per token, layer and head, where profiles were asked for."""
        return self._table("positions")

    @cached_property
    def by_query(self) -> pl.LazyFrame:
        """One row per number of a query, or of a bin of them, where measures ask for it."""
        return self._table("by_query")

    @cached_property
    def cells(self) -> pl.DataFrame:
        """One row per cell."""
        rows = [row for batch in self.batches for row in batch.cells]
        try:
            return self._in_order(pl.DataFrame(rows, schema=CELLS, orient="row"))
        except (pl.exceptions.PolarsError, TypeError, OverflowError) as error:
            raise _damaged(self.path, "an index in cells/ is not what was written") from error

    @cached_property
    def prompts(self) -> pl.DataFrame:
        """One row per prompt: its number, and what is known of it (a level, a document, the
        fields of its record), a column each.
        """
        return _metadata(self.path / "metadata.jsonl")

    @cached_property
    def image_tokens(self) -> list[dict[str, Any]]:
        """By model, prompt and condition: the tokens of each picture, and where they lie in it;
        empty without pictures."""
        path = self.path / IMAGE_TOKENS
        if not path.is_file():
            return []
        try:
            return [json.loads(line) for line in _lines(path)]
        except (OSError, ValueError) as error:
            raise _damaged(self.path, f"{IMAGE_TOKENS} cannot be read: {error}") from error

    @cached_property
    def completions(self) -> pl.DataFrame:
        """One row per completion and metric of an evaluation; empty for other runs."""
        digest = digests_in_manifest(self.path, "files").get(SCORED)
        if digest is None:
            return COMPLETIONS.to_frame()
        try:
            content = read_file(self.path / SCORED, LARGEST_SCORED)
            if hashlib.sha256(content).hexdigest() != digest:
                raise OSError("it does not have the content that was written")
            frame = pl.read_parquet(io.BytesIO(content)).match_to_schema(COMPLETIONS)
        except (OSError, pl.exceptions.PolarsError) as error:
            raise _damaged(self.path, f"{SCORED} cannot be read: {error}") from error
        return self._in_order(frame)

    @cached_property
    def claims(self) -> tuple[Claim, ...]:
        """The claims of the run's own: those it was started with, from its user or its recipe."""
        path = self.path / "claims.yaml"
        return load_claims(path) if path.is_file() else ()

    def verify(self) -> None:
        """Check that every table has the content that was written."""
        for table in TABLES:
            getattr(self, table)

    @property
    def failed(self) -> tuple[Failure, ...]:
        """The cells that could not be measured, with their errors."""
        return tuple(failure for batch in self.batches for failure in batch.failed)

    @property
    def elsewhere(self) -> list[dict[str, Any]]:
        """What was different from `environment` where some batches were measured, each once."""
        distinct = {json.dumps(batch.elsewhere): batch.elsewhere for batch in self.batches}
        return [different for different in distinct.values() if different]

    @property
    def ids(self) -> tuple[str, ...]:
        """The cells that are there."""
        return tuple(self.cells["cell"])

    def sql(self, query: str) -> pl.DataFrame:
        """The answer to an SQL query over the tables of the run."""
        schemas = {**QUERIED, "prompts": self.prompts.schema}
        columns = "\n".join(f"  {name}: {', '.join(schema)}" for name, schema in schemas.items())
        hint = f"The tables and their columns are\n{columns}"
        try:
            text, named = check_query(query, schemas)
        except InputError as error:
            raise InputError(f"{error}\n{hint}", code=error.code, **error.values) from error
        # A table is only read if it is named.
        tables: dict[str, pl.LazyFrame] = {name: getattr(self, name).lazy() for name in named}
        try:
            with pl.SQLContext(tables) as context:
                return context.execute(text, eager=True)
        except (pl.exceptions.PolarsError, TypeError, ValueError) as error:
            raise InputError(
                f"the query does not work: {error}\n{hint}", code="query-failed"
            ) from error

    def _table(self, table: str) -> pl.LazyFrame:
        schema = TABLES[table]
        held = [batch for batch in self.batches if table in batch.files]
        if not held:
            return schema.to_frame().lazy()
        try:
            if sum(batch.files[table].rows for batch in held) > HELD:
                files = [self._checked(batch, table) for batch in held]
                return pl.scan_parquet(files, schema=schema, glob=False)
            parts = [_read(batch, self.path, table) for batch in held]
            return self._in_order(pl.concat(parts).match_to_schema(schema)).lazy()
        except (DamageError, pl.exceptions.PolarsError) as error:
            raise _damaged(self.path, str(error)) from error

    def _checked(self, batch: BatchIndex, table: str) -> Path:
        """A file that is what was written, on a disk: of an object store, a copy."""
        path = batch.file(self.path, table)
        if not is_remote(path):
            batch.check(self.path, [table], check_content=True)
            return path
        copy = self._copies / path.name
        copy.write_bytes(_content(batch, self.path, table))
        return copy

    @cached_property
    def _copies(self) -> Path:
        """There to the end of the process: a frame may be asked long after its run is gone."""
        folder = tempfile.mkdtemp(prefix="attnscope-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    def _in_order(self, frame: pl.DataFrame) -> pl.DataFrame:
        experiment = self.experiment
        return frame.sort(
            pl.col("model").cast(pl.Enum(list(experiment.models))),
            "prompt",
            pl.col("condition").cast(pl.Enum([experiment.base, *experiment.variants])),
            maintain_order=True,
        )


def open_run(folder: str | Path) -> Run:
    """Open a run directory, finished or not, and read its tables.

    Args:
        folder: A directory that `attnscope run` or `attnscope reproduce` wrote, or its address in
            an object store.

    Returns:
        A `Run`. Its tables (`values`, `positions`, `tokens` …) are polars frames, read when they
        are first used. `complete` is False while cells are missing.

    Raises:
        InputError: The folder is no run, has another format, or its files were changed.

    Examples:
        >>> import attnscope
        >>> run = attnscope.open_run("runs/example")
        >>> run.complete
        True
        >>> run.values.filter(measure="entropy").collect().height > 0
        True
    """
    folder = to_path(folder)
    file = folder / "experiment.yaml"
    if not file.is_file():
        raise no_run(folder)
    if not is_remote(file) and file.is_symlink():
        raise InputError(
            f"{file} is a link; a run directory must hold the file itself",
            code="link-in-run",
            path=str(file),
        )
    refuse_other_formats(folder)
    experiment = read_experiment(file)
    try:
        environment = read_json(folder / "environment.json")
        complete = (folder / "manifest.json").is_file()
        batches = _finished_batches(folder, experiment) if complete else _unfinished_batches(folder)
        for batch in batches:
            batch.check(folder, check_content=False)
    except DamageError as error:
        raise _damaged(folder, str(error)) from error
    return Run(folder, experiment, environment, complete, tuple(batches))


def _finished_batches(folder: Path, experiment: Experiment) -> list[BatchIndex]:
    """The batches of a finished run."""
    path = folder / "manifest.json"
    manifest = read_json(path)
    ids, files = manifest.get("batches"), manifest.get("files")
    if not isinstance(ids, dict) or not isinstance(files, dict):
        raise DamageError(f"{path} does not have the content that was written", path=str(path))
    if manifest.get("experiment") != experiment.digest:
        raise InputError(
            f"{folder / 'experiment.yaml'} is not the experiment of this run. Only combine and "
            "normalise may be changed; run the changed experiment into another directory",
            code="experiment-changed",
            folder=str(folder),
        )
    for name, digest in files.items():
        try:
            same = digest_of(folder / name) == digest
        except (OSError, ValueError) as error:
            raise DamageError(
                f"{folder / name} cannot be read: {error}", path=str(folder / name)
            ) from error
        if not same:
            raise DamageError(
                f"{folder / name} does not have the content that was written",
                path=str(folder / name),
            )
    return [read_index(folder, id, digest) for id, digest in ids.items()]


def _unfinished_batches(folder: Path) -> list[BatchIndex]:
    """The batches of a run that is not finished."""
    names = sorted(path.name for path in (folder / "cells").glob("*.json"))
    return [read_index(folder, id) for name in names if (id := batch_of(name)) is not None]


def _read(batch: BatchIndex, folder: Path, table: str) -> pl.DataFrame:
    """A table of a batch, the same bytes that were checked."""
    return pl.read_parquet(io.BytesIO(_content(batch, folder, table)))


def _content(batch: BatchIndex, folder: Path, table: str) -> bytes:
    path = batch.file(folder, table)
    try:
        content = read_file(path, batch.files[table].size)
    except OSError as error:
        raise DamageError(f"{path} cannot be read: {error}", path=str(path)) from error
    if hashlib.sha256(content).hexdigest() != batch.files[table].digest:
        raise DamageError(f"{path} does not have the content that was written", path=str(path))
    return content


def _metadata(path: Path) -> pl.DataFrame:
    try:
        rows = [json.loads(line) for line in _lines(path)]
    except FileNotFoundError:
        rows = []
    except (OSError, ValueError) as error:
        raise _damaged(path.parent, f"{path} cannot be read: {error}") from error
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [pl.Series("prompt", range(len(rows)), dtype=CELLS["prompt"])]
    for name in names:
        label = name if name != "prompt" else "prompt_"  # the record's own field of that name
        columns.append(_column(label, [row.get(name) for row in rows]))
    return pl.DataFrame(columns)


def _lines(path: Path) -> list[str]:
    """Those that have something in them; of all line ends, JSON escapes all but one."""
    return [line for line in read_file(path, LARGEST_METADATA).decode("utf-8").split("\n") if line]


def _column(name: str, values: list[Any]) -> pl.Series:
    """Numbers and words as they are; anything else, or a mixture, as JSON."""
    types = {type(value) for value in values if value is not None}
    if types == {int, float}:
        types = {float}
    if len(types) <= 1 and types <= {str, int, float, bool}:
        try:
            return pl.Series(name, values, strict=False)
        except OverflowError:
            pass
    texts = [None if v is None else v if isinstance(v, str) else json.dumps(v) for v in values]
    return pl.Series(name, texts, dtype=pl.String)


def no_run(folder: Path) -> InputError:
    """The error for a directory that is none of ours."""
    if not folder.is_dir():
        return InputError(
            f"the directory {folder} does not exist", code="folder-missing", folder=str(folder)
        )
    inside = sorted(path.parent.name for path in folder.glob("*/experiment.yaml"))
    hint = f"; there are runs inside it: {', '.join(inside)}" if inside else ""
    return InputError(
        f"{folder} is not a run directory: it has no experiment.yaml{hint}",
        code="not-a-run",
        folder=str(folder),
        runs=inside,
    )


def refuse_other_formats(folder: Path) -> None:
    """Refuse a run that another version made, and say how to make it again."""
    try:
        stored_format = read_json(folder / "manifest.json").get("format", 1)
    except DamageError:
        return  # `open_run` reports it with what to do
    names: Iterable[str] = (path.name for path in (folder / "cells").glob("*.parquet"))
    old = any(name.count(".") == 1 for name in names)
    if (folder / "facts.jsonl").is_file() and not (folder / "manifest.json").is_file():
        old, stored_format = True, 3
    if old or ((folder / "manifest.json").is_file() and stored_format != FORMAT):
        raise InputError(
            f"{folder} was made by another version of attnscope (its tables have format "
            f"{stored_format}, this version reads {FORMAT}). Run its experiment again with "
            f"attnscope run {folder / 'experiment.yaml'} --out ANOTHER_DIRECTORY",
            code="other-run-format",
            format=stored_format,
            known=[FORMAT],
        )


def _damaged(folder: Path, what: str) -> InputError:
    return InputError(
        f"{folder} is damaged: {what}. To measure the damaged batches again, and nothing else: "
        f"attnscope run {folder / 'experiment.yaml'} --out {folder}",
        code="damaged-run",
        folder=str(folder),
        reason=what,
    )
