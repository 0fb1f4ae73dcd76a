"""Joining the parts of a run that were measured into directories of their own.

Parts are copied batch by batch, each compared with what was written; what is damaged or missing is
left out, and said. The result has the bytes that one run would have had.

This module must not know models, or what the tables say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscope.errors import InputError
from attnscope.paths import place, read_file
from attnscope.run.environment import elsewhere, refuse
from attnscope.run.layout import LARGEST, LARGEST_METADATA, DamageError, read_json, whole_index
from attnscope.run.store import no_run, refuse_other_formats
from attnscope.run.writer import Directory, opened
from attnscope.spec.experiment import Experiment
from attnscope.spec.experiment_yaml import read_experiment


@dataclass(frozen=True)
class Merged:
    """What was joined."""

    folder: Path
    batches: int
    """That are there now."""
    of: int
    """That the run has."""
    damaged: tuple[str, ...]
    """What was not taken, and why."""


def merge(parts: Sequence[str | Path], folder: str | Path) -> Merged:
    """Join the parts of a run into one directory, which may be one of them."""
    found = [_Part(place(part)) for part in parts]
    if not found:
        raise InputError("give the run directories to join", code="nothing-to-merge")
    first = found[0]
    for part in found[1:]:
        first.same_or_refuse(part)
    folder = place(folder)
    with opened(folder, first.experiment) as directory:
        if _there(directory):
            _Part(folder).same_or_refuse(first)
        damaged = [why for part in found for why in _copied(part, directory)]
        here = _Part(folder).models if _there(directory) else {}
        entries = {**here, **{label: one for part in found for label, one in part.models.items()}}
        in_order = {label: entries[label] for label in first.experiment.models if label in entries}
        directory.write_json("environment.json", first.environment | {"models": in_order})
        directory.write(
            "metadata.jsonl", read_file(first.folder / "metadata.jsonl", LARGEST_METADATA)
        )
        if (first.folder / "claims.yaml").is_file():
            directory.write("claims.yaml", read_file(first.folder / "claims.yaml", LARGEST))
        directory.write_plan(first.batches)
        whole = [id for id in first.batches if _whole(directory, id)]
        if len(whole) == len(first.batches):
            directory.finish(first.experiment, whole)
        else:
            directory.unfinish()
        return Merged(directory.folder, len(whole), len(first.batches), tuple(damaged))


class _Part:
    """A run directory that is joined."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not (folder / "experiment.yaml").is_file():
            raise no_run(folder)
        refuse_other_formats(folder)
        self.experiment: Experiment = read_experiment(folder / "experiment.yaml")
        try:
            self.environment = read_json(folder / "environment.json")
            plan = read_json(folder / "plan.json")
        except DamageError as error:
            raise InputError(
                f"{error}; run that part again", code=error.code, **error.values
            ) from error
        models, ids = self.environment.get("models"), plan.get("batches")
        if not isinstance(models, dict) or not isinstance(ids, list) or not ids:
            raise InputError(
                f"{folder} holds no measured batch, so there is nothing to join; run it first",
                code="nothing-to-merge",
                folder=str(folder),
            )
        self.models: dict[str, Any] = models
        self.batches: list[str] = [str(id) for id in ids]

    def same_or_refuse(self, other: _Part) -> None:
        """Refuse what does not belong together."""
        mine, its = self.experiment.measured(), other.experiment.measured()
        differing = [key for key in {**mine, **its} if mine.get(key) != its.get(key)]
        if self.batches != other.batches and not differing:
            differing = ["the models' weights, or the prompts"]
        differing += [
            f"model {label}"
            for label in self.models
            if other.models.get(label, self.models[label]) != self.models[label]
        ]
        if differing:
            raise InputError(
                f"{self.folder} and {other.folder} are not parts of one run: they differ in "
                f"{', '.join(differing)}",
                code="not-one-run",
                different=differing,
            )
        different = elsewhere(self.environment, other.environment, threads=True)
        refuse(self.environment, different, self.folder)


def _there(directory: Directory) -> bool:
    return (directory.folder / "environment.json").is_file()


def _whole(directory: Directory, id: str) -> bool:
    try:
        return not whole_index(directory.folder, id).failed
    except DamageError:
        return False


def _copied(part: _Part, directory: Directory) -> list[str]:
    """Copy the batches of a part that are not there; what could not be, and why."""
    left_out = []
    for id in part.batches:
        if not (part.folder / "cells" / f"{id}.json").is_file() or _whole(directory, id):
            continue
        try:
            index = whole_index(part.folder, id)
        except DamageError as error:
            left_out.append(str(error))
            continue
        for table in index.files:
            path = index.file(part.folder, table)
            directory.write(f"cells/{path.name}", read_file(path, index.files[table].size))
        directory.write(f"cells/{id}.json", index.content())
    return left_out
