"""`run`: measure what an experiment asks for, into a directory that can be continued.

Model by model, batch by batch. A batch with a missing cell is measured whole, as the plan laid it
out, and only the missing cells are written, so that a run that was stopped ends with the same
bytes as one that was not. Tables are built and written in a thread beside the model.

This module must not know charts, or what the numbers mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscope.errors import InputError
from attnscope.experiment.batch import measure_batch
from attnscope.experiment.environment import describe, describe_model, same_or_refuse
from attnscope.experiment.measured import Measured
from attnscope.experiment.plan import Batch, ModelPlan, Plan, make_plan
from attnscope.experiment.to_tables import TokenColumns, cell_tables
from attnscope.question.spec import Experiment
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


def run(experiment: Experiment, folder: str | Path, *, progress: Progress | None = None) -> Outcome:
    """Run an experiment into a directory, or continue it there."""
    return run_plan(make_plan(experiment), folder, progress=progress)


def run_plan(plan: Plan, folder: str | Path, *, progress: Progress | None = None) -> Outcome:
    """Run what was planned."""
    with opened(Path(folder), plan.experiment) as directory:
        planned = {cell.id for model in plan.models for batch in model.batches for cell in batch}
        done = directory.done()
        _refuse_strangers(directory, done - planned)
        environment = _environment(plan, directory)
        count = _Count(plan, done, progress)
        for model in plan.models:
            pending = [batch for batch in model.batches if any(c.id not in done for c in batch)]
            if pending:
                _run_model(plan, model, pending, directory, environment, done, count)
        directory.write_json("manifest.json", _manifest(plan))
        return Outcome(directory.folder, len(planned), len(planned - done))


def _refuse_strangers(directory: Directory, strangers: set[str]) -> None:
    if strangers:
        raise InputError(
            f"{directory.folder} holds {len(strangers)} cells that this experiment does not have: "
            "since they were made, a model, a file of prompts or of classes, or the device has "
            "changed. Give another directory with --out"
        )


def _environment(plan: Plan, directory: Directory) -> dict[str, Any]:
    """Recorded at the first start; the number of threads is kept to, since sums depend on it."""
    here, there = describe(plan), directory.environment()
    if there:
        same_or_refuse(there, here, directory.folder)
        if there["threads"] != here["threads"]:
            import torch

            torch.set_num_threads(there["threads"])
        return there
    directory.write_json("environment.json", here)
    return here


def _run_model(
    plan: Plan,
    of_model: ModelPlan,
    pending: list[Batch],
    directory: Directory,
    environment: dict[str, Any],
    done: set[str],
    count: _Count,
) -> None:
    from attnscope.capture.attention import watch
    from attnscope.loading import find, load

    experiment = plan.experiment
    model, _ = load(of_model.facts.pinned, device=experiment.device, dtype=experiment.dtype)
    if find(of_model.facts.pinned).revision != of_model.facts.revision:
        raise InputError(
            f"model {of_model.label!r} ({of_model.facts.name}) changed while it was loaded; start "
            "again, when it is finished"
        )
    with watch(model, layers=_listed(of_model.layers), backend=experiment.backend) as scope:
        backend = scope.backend  # no pass: only to see that the layers exist, and what measures
    environment["models"][of_model.label] = describe_model(of_model, model, backend)
    directory.write_json("environment.json", environment)
    vocabulary = TokenColumns(experiment, of_model)

    def store(batch: Batch, measured: dict[str, Measured]) -> None:
        for condition, cells in batch.cells.items():
            made = cell_tables(of_model.label, cells, measured[condition], vocabulary)
            for cell, tables in made:
                if cell.id not in done:
                    directory.write_cell(cell.id, tables)
        count.finished(batch)

    with _beside() as submit:
        for batch in pending:
            submit(store, batch, measure_batch(experiment, of_model, model, batch))


def _listed(layers: tuple[int, ...] | None) -> list[int] | None:
    return None if layers is None else list(layers)


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

    def __init__(self, plan: Plan, done: set[str], progress: Progress | None):
        batches = [batch for model in plan.models for batch in model.batches]
        self.cells = len(done)
        self.done = done
        self.progress = progress
        self.total = sum(b.tokens for b in batches if any(cell.id not in done for cell in b))
        self.tokens = 0
        if progress is not None:
            progress(self.cells, self.tokens, self.total)

    def finished(self, batch: Batch) -> None:
        self.cells += sum(cell.id not in self.done for cell in batch)
        self.tokens += batch.tokens
        if self.progress is not None:
            self.progress(self.cells, self.tokens, self.total)


def _manifest(plan: Plan) -> dict[str, Any]:
    """The rows of the table `cells`."""
    return {
        "experiment": plan.experiment.digest,
        "cells": [
            [
                cell.id,
                model.label,
                cell.prompt,
                cell.condition,
                len(cell.tokens),
                0 if cell.alignment is None else len(cell.alignment.filler),
                0 if cell.alignment is None else len(cell.alignment.variant_seam),
            ]
            for model in plan.models
            for cell in model.cells()
        ],
    }
