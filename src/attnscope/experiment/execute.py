"""`run`: measure what an experiment asks for, into a directory that can be continued.

An executor measures, batch by batch, as the plan laid them out; here the tables are built and
written, in a thread beside it. A run that was stopped ends with the same bytes as one that was
not, because a batch is there whole or is measured again.

This module must not know charts, or what the numbers mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.experiment.environment import describe, same_or_refuse
from attnscope.experiment.executor import Done, Executor, Work
from attnscope.experiment.local import local
from attnscope.experiment.plan import Batch, Plan, make_plan
from attnscope.experiment.to_tables import TokenColumns, cell_tables
from attnscope.question.claims import Claim
from attnscope.question.spec import Experiment
from attnscope.run.schemas import CELLS
from attnscope.run.writer import Directory, opened

__all__ = ["Outcome", "Progress", "run", "run_plan"]

# Batches that may wait for the disk; more would only fill the memory.
WAITING = 2

Progress = Callable[[int, int, int], None]
"""Called as cells are finished: how many, and how many tokens were worked through and in all."""


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    folder: Path
    cells: int
    """In all."""
    measured: int
    """This time; the others were there."""


def run(
    experiment: Experiment,
    folder: str | Path,
    *,
    executor: Executor = local,
    progress: Progress | None = None,
    claims: Iterable[Claim] | None = None,
) -> Outcome:
    """Run an experiment into a directory, or continue it there. Claims of one's own, beside the
    built-in ones, are frozen there at the first start."""
    plan = make_plan(experiment)
    return run_plan(plan, folder, executor=executor, progress=progress, claims=claims)


def run_plan(
    plan: Plan,
    folder: str | Path,
    *,
    executor: Executor = local,
    progress: Progress | None = None,
    claims: Iterable[Claim] | None = None,
) -> Outcome:
    """Run what was planned."""
    with opened(Path(folder), plan.experiment) as directory:
        work = [Work(model, batch) for model in plan.models for batch in model.batches]
        _refuse_strangers(directory, {one.batch.id for one in work})
        directory.write_lines("facts.jsonl", plan.facts)
        environment = _environment(plan, directory, claims)
        profiles = ("positions",) if "profile" in plan.experiment.measures else ()
        done = directory.done(
            {
                one.batch.id: ("values", "tokens", *profiles)
                for one in work
                if one.model.label in environment["models"]  # else nobody knows what made it
            }
        )
        pending = [one for one in work if one.batch.id not in done]
        if pending:
            directory.unfinish()
            count = _Count(work, done, progress)
            _carry_out(plan, pending, directory, environment, executor, count)
        directory.finish(plan.experiment, [one.batch.id for one in work])
        cells = sum(len(one.batch) for one in work)
        return Outcome(directory.folder, cells, sum(len(one.batch) for one in pending))


def _refuse_strangers(directory: Directory, planned: set[str]) -> None:
    strangers = directory.batches() - planned
    if strangers:
        raise InputError(
            f"{directory.folder} holds {len(strangers)} batches of cells that this experiment does "
            "not have: since they were made, a model, a file of prompts or of classes, or the "
            "device has changed. Give another directory with --out"
        )


def _environment(
    plan: Plan, directory: Directory, claims: Iterable[Claim] | None
) -> dict[str, Any]:
    """Recorded at the first start."""
    here, there = describe(plan, claims), directory.environment()
    if there:
        same_or_refuse(there, here, directory.folder)
        return there
    directory.write_json("environment.json", here)
    return here


def _carry_out(
    plan: Plan,
    pending: list[Work],
    directory: Directory,
    environment: dict[str, Any],
    executor: Executor,
    count: _Count,
) -> None:
    columns = lru_cache(maxsize=1)(lambda model: TokenColumns(plan.experiment, model))

    def store(done: Done) -> None:
        batch = done.work.batch
        tables = _tables(done, columns(done.work.model))
        rows = [_row(plan, done, cell) for cell in batch.by_prompt()]
        directory.write_batch(batch.id, rows, tables)
        count.finished(batch)

    measuring = executor(plan, pending, threads=environment["threads"])
    with closing(measuring), _beside() as submit:
        for done in measuring:
            if _recorded(plan, environment, done):
                directory.write_json("environment.json", environment)
            submit(store, done)


def _recorded(plan: Plan, environment: dict[str, Any], done: Done) -> bool:
    """Whether a model was entered that was not there; the entries keep the plan's order."""
    label, entries = done.work.model.label, environment["models"]
    if label not in entries:
        entries[label] = done.about
        known = [model.label for model in plan.models if model.label in entries]
        environment["models"] = {label: entries[label] for label in known}
        return True
    if entries[label] != done.about:
        differing = [key for key in done.about if entries[label].get(key) != done.about[key]]
        raise InputError(
            f"model {label!r} is not as it was when the run began: its {', '.join(differing)} "
            "differ; give another directory with --out"
        )
    return False


def _tables(done: Done, columns: TokenColumns) -> dict[str, pl.DataFrame]:
    """The tables of a batch, cell after cell."""
    label, batch = done.work.model.label, done.work.batch
    of_cell = {
        cell.id: tables
        for condition, cells in batch.cells.items()
        for cell, tables in cell_tables(label, cells, done.measured[condition], columns)
    }
    ordered = [of_cell[cell.id] for cell in batch.by_prompt()]
    return {name: pl.concat([tables[name] for tables in ordered]) for name in ordered[0]}


def _row(plan: Plan, done: Done, cell: Any) -> list[Any]:
    """The row of the table `cells`."""
    pair = cell.alignment
    row = {
        "cell": cell.id,
        "model": done.work.model.label,
        "prompt": cell.prompt,
        "condition": cell.condition,
        "tokens": len(cell.tokens),
        "filler_tokens": 0 if pair is None else len(pair.filler),
        "seam_tokens": 0 if pair is None else len(pair.variant_seam),
        "base_seam_tokens": 0 if pair is None else len(pair.base_seam),
    }
    return [row[name] for name in CELLS]


@contextmanager
def _beside() -> Iterator[Callable[..., None]]:
    """Do things in order in a thread beside; what goes wrong there is raised here, soon."""
    waiting: deque[Future[None]] = deque()

    def submit(work: Callable[..., None], *arguments: Any) -> None:
        while waiting and (len(waiting) >= WAITING or waiting[0].done()):
            waiting.popleft().result()
        waiting.append(pool.submit(work, *arguments))

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="attnscope-writer") as pool:
        try:
            yield submit
            while waiting:
                waiting.popleft().result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class _Count:
    """How far a run is."""

    def __init__(self, work: list[Work], done: set[str], progress: Progress | None):
        self.cells = sum(len(one.batch) for one in work if one.batch.id in done)
        self.progress = progress
        self.total = sum(one.batch.tokens for one in work if one.batch.id not in done)
        self.tokens = 0
        self._tell()

    def finished(self, batch: Batch) -> None:
        self.cells += len(batch)
        self.tokens += batch.tokens
        self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self.cells, self.tokens, self.total)
