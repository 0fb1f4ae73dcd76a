"""A run directory that gets a model label, `step N`, each time a training is measured.

The prompts and their batches are the same at every step, so steps are paired by prompt. What was
measured at a step is written as a whole, or not at all.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from attnscope.errors import InputError, ModelError
from attnscope.experiment.batch_store import BatchStore
from attnscope.experiment.batching import kind_of
from attnscope.experiment.cells import batch_of
from attnscope.experiment.executor import Done, Work
from attnscope.experiment.measuring_environment import describe, describe_model
from attnscope.experiment.model_info import ModelInfo
from attnscope.experiment.plan import ModelPlan, ModelSource, Plan, make_plan
from attnscope.experiment.results import measure_batch
from attnscope.experiment.split_retry import split_and_retry
from attnscope.interception.wrappers import unwrapped
from attnscope.loading.compatibility import add_bos
from attnscope.run.environment import accept_differences, differences
from attnscope.run.folder_checks import differing_keys
from attnscope.run.layout import DamageError, checked_index
from attnscope.run.store import refuse_other_formats
from attnscope.run.writer import Directory, open_directory
from attnscope.scope.watch import watch
from attnscope.spec.experiment import Experiment, make_experiment
from attnscope.spec.experiment_yaml import read_experiment

FIXED = ("models", "name", "device", "dtype")
"""Keys of an experiment that follow from the model that is trained."""


def label_of(step: int | str) -> str:
    """The model label of a step; the figure `over-steps` reads the number."""
    return f"step {step}"


@dataclass
class _Stored:
    """What the run directory holds."""

    steps: list[int]
    experiment: Experiment | None
    """None before the first step is written."""
    environment: dict[str, Any]
    elsewhere: dict[str, Any]
    """What is different now from the environment that was recorded first."""


class TrainingRun:
    """The run directory of a training, and the plan of its probes."""

    def __init__(self, folder: Path, model: Any, tokenizer: Any, keys: Mapping[str, Any]):
        for key in FIXED:
            if key in keys:
                raise InputError(
                    f"{key!r} follows from the model that is trained; leave it out",
                    code="fixed-key",
                    value=key,
                    known=list(FIXED),
                )
        self.folder = folder
        inner = unwrapped(model)
        # A run holds no path of this machine, and this name is none that can be loaded.
        self._name = f"training:{Path(inner.config.name_or_path).name or type(inner).__name__}"
        if keys.get("bos"):
            tokenizer = copy.deepcopy(tokenizer)  # that of the training stays as it is
            add_bos(tokenizer, self._name)
        label = label_of(0)
        self._plan: Plan = make_plan(
            make_experiment(
                name="training",
                models={label: self._name},
                device=kind_of(str(inner.device)),
                **keys,
            ),
            {label: ModelSource(_info(inner, self._name), tokenizer, inner.config)},
        )
        self._stored = _Stored([], None, {}, {})

    def start(self, step: int) -> None:
        """Check the directory before the training starts: it is empty, or it has the earlier steps
        of this training, which is resumed at `step`."""
        here = describe(self._plan)
        self._stored = _Stored([], None, here, {})
        file = self.folder / "experiment.yaml"
        if not file.is_file():
            return
        refuse_other_formats(self.folder)
        stored = read_experiment(file)
        changed = [k for k in differing_keys(stored, self._experiment([0])) if k != "models"]
        if step == 0 or changed:
            reason = f"it differs in {', '.join(changed)}" if changed else "this one is at step 0"
            raise InputError(
                f"{self.folder} holds the run of another training ({reason}); give another folder "
                "with out=…, delete the folder, or resume the training from its checkpoint",
                code="other-training",
                folder=str(self.folder),
                keys=changed,
            )
        recorded = Directory(self.folder).environment()
        elsewhere = differences(recorded, here | {"experiment": recorded.get("experiment")})
        accept_differences(recorded, elsewhere, self.folder, mixed=True)
        steps = [int(label.removeprefix(label_of(""))) for label in stored.models]
        complete = [one for one in steps if one < step and self._is_whole(one)]
        self._stored = _Stored(complete, stored, recorded, elsewhere)

    def _is_whole(self, step: int) -> bool:
        """Whether everything that was measured at a step is there, undamaged."""
        try:
            for batch in self._of_step(step).batches:
                checked_index(self.folder, batch.id)
        except DamageError:
            return False
        return True

    def probe(self, model: Any, step: int) -> pl.DataFrame:
        """Measure the model at a step, write it, and return the `values` of the step."""
        inner, of_model = unwrapped(model), self._of_step(step)
        layers = None if of_model.layers is None else list(of_model.layers)
        with watch(inner, layers=layers, backend=self._plan.experiment.backend) as scope:
            about = describe_model(of_model, inner, scope.backend)
        finished = []
        for batch in of_model.batches:
            parts, failed = split_and_retry(
                batch, lambda part: measure_batch(self._plan.experiment, of_model, inner, part)
            )
            if failed:
                prompt, why = next(iter(failed.items()))
                raise ModelError(
                    f"{len(failed)} of {len(batch.numbers)} prompts could not be measured; prompt "
                    f"{prompt}: {why}",
                    code="probe-failed",
                    failed=failed,
                )
            finished.append(Done(Work(of_model, batch), tuple(parts), {}, about))
        self._write(step, finished, about)
        cells = self.folder / "cells"
        files = [cells / f"{batch.id}.values.parquet" for batch in of_model.batches]
        return pl.concat([pl.read_parquet(file) for file in files])

    def _experiment(self, steps: list[int]) -> Experiment:
        return self._plan.stored.with_keys(models={label_of(step): self._name for step in steps})

    def _of_step(self, step: int) -> ModelPlan:
        """The plan of a step: that of step 0 with other identities of its batches."""
        (first,) = self._plan.models
        label = label_of(step)
        batches = tuple(
            batch_of(f"{label}\n".encode() + one.identity, list(one.numbers), list(one.rows))
            for one in first.batches
        )
        info = replace(first.info, revision=label)
        return replace(first, label=label, info=info, batches=batches)

    def _write(self, step: int, finished: list[Done], about: dict[str, Any]) -> None:
        """Add a step to the directory. Steps from here on, of a training that was resumed, go."""
        stored = self._stored
        kept = [one for one in stored.steps if one < step]
        steps = [*kept, step]
        experiment = self._experiment(steps)
        old, new = (
            [b.id for s in some for b in self._of_step(s).batches] for some in (kept, [step])
        )
        models = stored.environment["models"] | {label_of(step): about}
        environment = stored.environment | {
            "experiment": experiment.digest,
            "models": {label_of(one): models[label_of(one)] for one in steps},
        }
        content = self._plan.settled.hub_file
        with open_directory(
            self.folder, experiment, prompts=content, old=stored.experiment
        ) as directory:
            for id in directory.batches() - set(old):
                directory.remove_batch(id)
            directory.write_lines("metadata.jsonl", self._plan.metadata)
            directory.write_plan([*old, *new])
            directory.write_json("environment.json", environment)
            store = BatchStore(experiment, directory, stored.elsewhere)
            for done in finished:
                store(done)
            directory.finish(experiment, [*old, *new])
        self._stored = _Stored(steps, experiment, environment, stored.elsewhere)


def _info(model: Any, name: str) -> ModelInfo:
    """The shape of a model in memory."""
    text = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    return ModelInfo(
        name=name,
        pinned=name,
        revision=label_of(0),
        architecture=type(model).__name__,
        layers=getattr(text, "num_hidden_layers", None),
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        bundled=False,
    )
