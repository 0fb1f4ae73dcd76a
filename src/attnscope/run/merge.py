"""Joining the parts of a run that were measured into directories of their own.

Parts are copied batch by batch, each compared with what was written; what is damaged or missing is
left out and reported. The result has the bytes that one run would have had.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attnscope.errors import InputError
from attnscope.paths import read_file, to_path
from attnscope.run.environment import differences, refuse_differences
from attnscope.run.layout import (
    IMAGE_TOKENS,
    LARGEST,
    LARGEST_METADATA,
    DamageError,
    checked_index,
    read_json,
)
from attnscope.run.store import no_run, refuse_other_formats
from attnscope.run.writer import Directory, open_directory
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
    parts_found = [_Part(to_path(part)) for part in parts]
    if not parts_found:
        raise InputError("give the run directories to join", code="nothing-to-merge")
    first = parts_found[0]
    for part in parts_found[1:]:
        first.check_same_run(part)
    folder = to_path(folder)
    with open_directory(folder, first.experiment) as directory:
        if _has_environment(directory):
            _Part(folder).check_same_run(first)
        damaged = [why for part in parts_found for why in _copy_batches(part, directory)]
        here = _Part(folder).models if _has_environment(directory) else {}
        entries = {
            **here,
            **{label: one for part in parts_found for label, one in part.models.items()},
        }
        in_order = {label: entries[label] for label in first.experiment.models if label in entries}
        directory.write_json("environment.json", first.environment | {"models": in_order})
        directory.write(
            "metadata.jsonl", read_file(first.folder / "metadata.jsonl", LARGEST_METADATA)
        )
        _copy_pictures(first.folder, directory)
        if (first.folder / "claims.yaml").is_file():
            directory.write("claims.yaml", read_file(first.folder / "claims.yaml", LARGEST))
        directory.write_plan(first.batches)
        complete = [id for id in first.batches if _is_complete(directory, id)]
        if len(complete) == len(first.batches):
            directory.finish(first.experiment, complete)
        else:
            directory.remove_manifest()
        return Merged(directory.folder, len(complete), len(first.batches), tuple(damaged))


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

    def check_same_run(self, other: _Part) -> None:
        """Refuse what does not belong together."""
        mine, its = self.experiment.identity(), other.experiment.identity()
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
        different = differences(self.environment, other.environment, threads=True)
        refuse_differences(self.environment, different, self.folder)


def _copy_pictures(folder: Path, directory: Directory) -> None:
    """The pictures of the prompts, and the places of their tokens, if there are any."""
    if not (folder / IMAGE_TOKENS).is_file():
        return
    for path in sorted((folder / "images").iterdir()):
        directory.keep_picture(f"images/{path.name}", partial(read_file, path, LARGEST))
    rows = read_file(folder / IMAGE_TOKENS, LARGEST_METADATA).decode("utf-8").splitlines()
    directory.keep_image_tokens([json.loads(row) for row in rows])


def _has_environment(directory: Directory) -> bool:
    return (directory.folder / "environment.json").is_file()


def _is_complete(directory: Directory, id: str) -> bool:
    try:
        return not checked_index(directory.folder, id).failed
    except DamageError:
        return False


def _copy_batches(part: _Part, directory: Directory) -> list[str]:
    """Copy the batches of a part that are not there; what could not be, and why."""
    left_out = []
    for id in part.batches:
        if not (part.folder / "cells" / f"{id}.json").is_file() or _is_complete(directory, id):
            continue
        try:
            index = checked_index(part.folder, id)
        except DamageError as error:
            left_out.append(str(error))
            continue
        for table in index.files:
            path = index.file(part.folder, table)
            directory.write(f"cells/{path.name}", read_file(path, index.files[table].size))
        directory.write(f"cells/{id}.json", index.content())
    return left_out
