"""Checks what is in a directory before a run is written there."""

from pathlib import Path

from attnscope.errors import InputError
from attnscope.paths import UNFINISHED
from attnscope.spec.experiment import Experiment


def make_folder(folder: Path) -> None:
    """Make the directory of a run; refuse a link without a target, or a file."""
    if folder.is_symlink() and not folder.exists():
        raise InputError(
            f"{folder} is a link without a target; give a directory with --out",
            code="not-a-directory",
            folder=str(folder),
        )
    if folder.exists() and not folder.is_dir():
        raise InputError(
            f"{folder} is a file; give a directory with --out",
            code="not-a-directory",
            folder=str(folder),
        )
    folder.mkdir(parents=True, exist_ok=True)


def inside(folder: Path) -> list[Path]:
    """What is there; an object store has no empty directories."""
    return list(folder.iterdir()) if folder.is_dir() else []


def may_precede_a_run(path: Path) -> bool:
    """What may be there before the first file is: the rest of an interrupted beginning."""
    return (
        path.name.endswith(UNFINISHED)
        or path.name.startswith("prompts.")
        or (path.name == "cells" and path.is_dir() and not inside(path))
    )


def differing_keys(one: Experiment, other: Experiment) -> list[str]:
    """The keys in which two experiments differ, but for those that change no stored number."""
    first, second = one.identity(), other.identity()
    return [key for key in {**first, **second} if first.get(key) != second.get(key)]


def check_same(
    folder: Path, file: Path, stored_experiment: Experiment, experiment: Experiment
) -> None:
    """Refuse a directory that holds a run of another experiment."""
    differing = differing_keys(stored_experiment, experiment)
    if differing:
        stored, new = stored_experiment.identity(), experiment.identity()
        differences = "; ".join(
            f"{key}: {stored.get(key)} there, {new.get(key)} here" for key in differing
        )
        raise InputError(
            f"{folder} holds another experiment, which differs in {', '.join(differing)} "
            f"({differences}). Give another directory with --out, or run the experiment of this "
            f"directory: attnscope run {file} --out {folder}",
            code="other-experiment",
            folder=str(folder),
            keys=differing,
        )
