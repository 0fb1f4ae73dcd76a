"""Evaluates a task of lm-evaluation-harness into a run directory, one batch per condition.

The attention is measured during the same forward passes. Finished conditions are not repeated.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.evaluate.evaluation import PREFIX, Evaluation
from attnscope.evaluate.harness import ConditionedLM, document_scores, run_task
from attnscope.experiment.batching import default_tokens
from attnscope.experiment.measuring_environment import describe, describe_model
from attnscope.experiment.model_info import model_info
from attnscope.experiment.plan import ModelPlan, Plan, Settled
from attnscope.loading import load_text_model, load_tokenizer
from attnscope.loading.device import chosen_device
from attnscope.run.environment import accept_differences, differences
from attnscope.run.layout import SCORED
from attnscope.run.schemas import CELLS, COMPLETIONS, VALUES
from attnscope.run.writer import Directory, open_directory


def evaluate_harness(
    evaluation: Evaluation, conditions: Sequence[str], folder: Path, *, batch: int
) -> None:
    """Evaluate the conditions that are not in `folder` yet, and store them there."""
    if evaluation.samples > 1 or evaluation.level is not None:
        raise InputError(
            "a task of lm-evaluation-harness sets samples and level itself; leave them out",
            code="unsupported-argument",
            samples=evaluation.samples,
            level=evaluation.level,
        )
    if evaluation.match != "exact":
        raise InputError(
            "a task of lm-evaluation-harness judges completions itself; --match is for files",
            code="unsupported-argument",
            match=evaluation.match,
        )
    plan = _plan(evaluation, conditions)
    (of_model,) = plan.models
    ((label, class_set),) = plan.experiment.classes.items()
    ids = {
        name: hashlib.sha256(f"{plan.stored.digest} {name}".encode()).hexdigest()[:24]
        for name in plan.experiment.conditions
    }
    with open_directory(folder, plan.stored) as directory:
        environment = _environment(plan, directory)
        directory.write_plan(list(ids.values()))
        done = directory.done({id: ["values"] for id in ids.values()})
        stored = _stored(folder, [name for name, id in ids.items() if id in done])
        finished = set(stored["condition"])
        if finished == ids.keys() and directory.as_written(SCORED):
            return
        directory.remove_manifest()
        lm = None
        for name, condition in plan.experiment.conditions.items():
            if name in finished:
                continue
            if lm is None:
                model, tokenizer = load_text_model(of_model.info.pinned, **evaluation.placement)
                environment["models"] = {of_model.label: describe_model(of_model, model, "auto")}
                directory.write_json("environment.json", environment)
            options: dict[str, Any] = {"seed": evaluation.seed, "classes": class_set}
            lm = ConditionedLM(model, tokenizer, condition, batch=batch, **options)
            task = evaluation.task.removeprefix(PREFIX)
            chat = plan.settled.chat
            results = run_task(lm, task, problems=evaluation.problems, chat=chat)
            rows = pl.DataFrame(document_scores(results))
            numbers = rows.select("task", "document").unique().sort("task", "document")
            numbers = numbers.with_row_index("prompt").cast({"prompt": pl.Int32})
            metadata = numbers.select("task", "document").to_dicts()
            directory.write_lines("metadata.jsonl", metadata)
            where = {"model": of_model.label, "condition": name}
            stored = pl.concat([stored, _completions(rows, numbers, where)])
            directory.write_completions(stored)
            # Written last: the condition counts as finished once its batch is there.
            values = _values(lm.attention, numbers, where, label)
            cells = _cells(lm, numbers, ids[name], where)
            directory.write_batch(ids[name], cells, {"values": values})
        directory.write_completions(stored)
        directory.finish(plan.stored, list(ids.values()))


def _plan(evaluation: Evaluation, conditions: Sequence[str]) -> Plan:
    """The experiment, without prompts: the harness writes them."""
    task = evaluation.task.removeprefix(PREFIX)
    prompts = {"source": "lm-eval", "task": task, "count": evaluation.problems}
    info = model_info(evaluation.model)
    tokenizer = load_tokenizer(info.pinned)
    chat = bool(tokenizer.chat_template) if evaluation.chat is None else evaluation.chat
    experiment = evaluation.experiment(conditions, prompts=prompts, queries=["last"])
    device = chosen_device(evaluation.device)
    settled = Settled(chat=chat, batch_tokens=default_tokens(device), digest=None)
    model = ModelPlan(evaluation.model, info, tokenizer, None, None, None, None, ())
    return Plan(experiment, settled, (model,), device, ())


def _environment(plan: Plan, directory: Directory) -> dict[str, Any]:
    here, recorded = describe(plan), directory.environment()
    if recorded:
        different = differences(recorded, here)
        accept_differences(recorded, different, directory.folder, mixed=False)
    return recorded or here


def _stored(folder: Path, conditions: Sequence[str]) -> pl.DataFrame:
    """The completions of the finished conditions."""
    file = folder / SCORED
    if not conditions or not file.is_file():
        return COMPLETIONS.to_frame()
    table = pl.read_parquet(file).match_to_schema(COMPLETIONS)
    return table.filter(pl.col("condition").is_in(conditions))


def _completions(rows: pl.DataFrame, numbers: pl.DataFrame, where: dict[str, str]) -> pl.DataFrame:
    """A score that is not the mean of its values is kept as the total of the condition."""
    means = pl.col("value").mean().over("task", "metric")
    is_mean = (means - pl.col("score")).abs() <= 1e-9
    return _in_schema(
        rows.join(numbers, on=["task", "document"], maintain_order="left").with_columns(
            total=pl.when(~is_mean).then("score")
        ),
        COMPLETIONS,
        where,
    )


def _values(
    attention: pl.DataFrame, numbers: pl.DataFrame, where: dict[str, str], label: str
) -> pl.DataFrame:
    of_mass = pl.when(pl.col("measure") == "mass").then(pl.lit(label))
    frame = attention.join(numbers, on=["task", "document"], maintain_order="left")
    frame = frame.with_columns(classes=of_mass).sort("prompt", maintain_order=True)
    return _in_schema(frame, VALUES, where | {"queries": "last", "keys": "all"})


def _cells(
    lm: ConditionedLM, numbers: pl.DataFrame, id: str, where: dict[str, str]
) -> list[list[Any]]:
    """The rows of the table `cells`; how many tokens of a request are filler is not counted."""
    rows = []
    for number, task, document in numbers.rows():
        cell = hashlib.sha256(f"{id} {number}".encode()).hexdigest()[:24]
        tokens = lm.lengths[task, document]
        row = where | {"cell": cell, "prompt": number, "tokens": tokens, "generated_tokens": 0}
        rows.append([row.get(name) for name in CELLS])
    return rows


def _in_schema(frame: pl.DataFrame, schema: pl.Schema, fixed: dict[str, str]) -> pl.DataFrame:
    """The columns of a table; what the frame does not have is the same in all rows, or null."""
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(fixed.get(name))).cast(dtype).alias(name)
        for name, dtype in schema.items()
    )
