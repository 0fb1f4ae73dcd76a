"""Plans a run that continues, or that gets more prompts: `attnscope run --extend`.

The cells of the earlier prompts stay as they are: their batches are planned as before, and the new
prompts have batches of their own. The key `interim` of the experiment keeps how many prompts there
were at each earlier look at the results.
"""

import json
from pathlib import Path
from typing import Any

from attnscope.errors import InputError
from attnscope.experiment.plan import Plan, make_plan
from attnscope.experiment.prompt_list import samples_of
from attnscope.paths import read_file
from attnscope.run.folder_checks import differing_keys
from attnscope.run.layout import LARGEST_METADATA, read_json
from attnscope.run.schemas import REPEATS
from attnscope.spec.experiment import Experiment
from attnscope.spec.experiment_yaml import read_experiment


def plan_run(
    experiment: Experiment, folder: Path, *, extend: bool = False
) -> tuple[Plan, Experiment | None]:
    """The plan of a run in this directory; and the experiment there, if the plan extends it.

    A run that was extended before continues with the same `interim`.
    """
    file = folder / "experiment.yaml"
    stored = read_experiment(file) if file.is_file() else None
    if stored is None:
        if extend:
            raise InputError(
                f"--extend adds prompts to a finished run, and {folder} is no run; run the "
                "experiment without it",
                code="no-run-to-extend",
                folder=str(folder),
            )
        return make_plan(experiment), None
    plan = _plan(experiment, stored)
    keys = differing_keys(stored, plan.stored)
    if keys != ["prompts"] and not (extend and keys):
        return plan, None
    if keys != ["prompts"]:
        raise InputError(
            f"--extend adds prompts and changes nothing else; the experiment in {folder} differs "
            f"in {', '.join(keys)}",
            code="other-experiment",
            folder=str(folder),
            keys=keys,
        )
    before = _metadata(folder)
    same = _same_prompts(experiment, stored, plan, before)
    if not extend:
        raise InputError(
            f"{folder} has {len(before)} prompts, and the experiment has {len(plan.metadata)}; the "
            f"first {same} are the same. "
            + ("Add the others with --extend" if same == len(before) else "Give another --out"),
            code="other-experiment",
            folder=str(folder),
            keys=keys,
            same=same,
        )
    if same < len(before) or len(plan.metadata) <= len(before):
        raise InputError(
            f"{folder} has {len(before)} prompts, and only the first {same} of them are those of "
            f"the experiment, which has {len(plan.metadata)}; --extend keeps all prompts of a run "
            "and adds others behind them",
            code="prompts-changed",
            folder=str(folder),
            same=same,
            before=len(before),
        )
    _check_finished(folder, stored, len(before))
    longer = make_plan(experiment.with_keys(interim=(*stored.interim, len(before))))
    _check_batches(longer, folder)
    return longer, stored


def _plan(experiment: Experiment, stored: Experiment) -> Plan:
    """The plan with the history of the run, unless the experiment has too few prompts for it."""
    if experiment.interim or not stored.interim:
        return make_plan(experiment)
    try:
        return make_plan(experiment.with_keys(interim=stored.interim))
    except InputError as error:
        if error.code != "bad-interim":
            raise
        return make_plan(experiment)


def _metadata(folder: Path) -> list[dict[str, Any]]:
    """The metadata of the prompts of a run."""
    try:
        text = read_file(folder / "metadata.jsonl", LARGEST_METADATA).decode("utf-8")
        return [json.loads(line) for line in text.split("\n") if line]
    except (OSError, ValueError):
        return []


def _same_prompts(
    experiment: Experiment, stored: Experiment, plan: Plan, before: list[dict[str, Any]]
) -> int:
    """How many of the first prompts are the same: their text, their regions, and the metadata
    that the run has of them."""
    new = samples_of(experiment, plan.settled.hub_file)
    pairs = zip(samples_of(stored), new, before, plan.metadata, strict=False)
    for number, (old_sample, new_sample, old, fields) in enumerate(pairs):
        kept = {name: value for name, value in old.items() if name != REPEATS}
        today = {name: json.loads(json.dumps(fields.get(name), default=str)) for name in kept}
        if old_sample.prompt != new_sample.prompt or today != kept:
            return number
    return min(len(before), len(new))


def _check_finished(folder: Path, stored: Experiment, before: int) -> None:
    """Raise an error if the run has no complete results yet."""
    ids = read_json(folder / "plan.json").get("batches", [])
    missing = sum(not (folder / "cells" / f"{id}.json").is_file() for id in ids)
    if missing or not ids or before <= max(stored.interim, default=0):
        raise InputError(
            f"{folder} is not finished, so it cannot be extended; finish it first: attnscope run "
            f"{folder / 'experiment.yaml'} --out {folder}",
            code="run-not-finished",
            folder=str(folder),
            missing=missing,
        )


def _check_batches(plan: Plan, folder: Path) -> None:
    """Raise an error if the cells of the run would not stay as they are."""
    planned = {batch.id for model in plan.models for batch in model.batches}
    if lost := set(read_json(folder / "plan.json")["batches"]) - planned:
        raise InputError(
            f"{len(lost)} batches of {folder} would be measured otherwise today: a model, the "
            "device or the version of a package has changed since. Give another directory with "
            "--out",
            code="other-batches",
            folder=str(folder),
            batches=len(lost),
        )
