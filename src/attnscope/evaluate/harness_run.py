"""Evaluates a task of lm-evaluation-harness under conditions, paired by document.

The attention is measured during the same forward passes. Finished conditions are not repeated.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from attnscope.errors import InputError
from attnscope.evaluate.condition_parser import ParsedCondition
from attnscope.evaluate.jsonl import read_lines, to_lines, write_atomically
from attnscope.evaluate.scores import BASELINE, compare_with_baseline
from attnscope.loading import load

PREFIX = "lm-eval:"
ATTENTION, SAMPLES = "attention.csv", "samples.jsonl"
ATTENTION_COLUMNS = ("entropy", "first_token")
"""The measures of attention that the table of scores has as columns."""


def is_harness(task: str) -> bool:
    """Whether a task is one of lm-evaluation-harness: `lm-eval:NAME`, or a YAML file."""
    return task.startswith(PREFIX) or task.endswith((".yaml", ".yml"))


def evaluate_harness(
    evaluation: Any,
    conditions: Sequence[ParsedCondition],
    out: Path | None,
    *,
    batch: int,
    progress: Callable[[str, int, int], None] | None,
) -> pl.DataFrame:
    """One row per metric and condition: the harness's score, the difference from the baseline
    paired by document, and the attention from the last prompt token, mean over layers and
    documents."""
    from attnscope.evaluate.harness import document_scores, evaluate_task

    if evaluation.samples > 1 or evaluation.level is not None:
        raise InputError(
            "a task of lm-evaluation-harness sets samples and level itself; leave them out",
            code="unsupported-argument",
            samples=evaluation.samples,
            level=evaluation.level,
        )
    rows, attention = _stored(out)
    model: Any = None
    tokenizer: Any = None
    for condition in conditions:
        if condition.name in {row["condition"] for row in rows}:
            continue
        if model is None:
            model, tokenizer = load(evaluation.model)
        chat = evaluation.chat
        results, measured = evaluate_task(
            *(model, tokenizer, condition, evaluation.task.removeprefix(PREFIX)),
            problems=evaluation.problems,
            chat=bool(tokenizer.chat_template) if chat is None else chat,
            batch=batch,
            seed=evaluation.seed,
        )
        lines = [{"condition": condition.name, **row} for row in document_scores(results)]
        rows += lines
        name = pl.lit(condition.name).alias("condition")
        attention.append(measured.select(name, pl.all()))
        if out is not None:
            write_atomically(out / ATTENTION, pl.concat(attention).write_csv().encode())
            # Written last: the condition counts as finished once its samples are stored.
            write_atomically(out / SAMPLES, to_lines(rows))
        if progress is not None:
            progress(condition.name, len(lines), len(lines))
    return table([one.name for one in conditions], pl.DataFrame(rows), pl.concat(attention))


def _stored(out: Path | None) -> tuple[list[dict[str, Any]], list[pl.DataFrame]]:
    """The samples and the attention of the finished conditions."""
    rows = [] if out is None else read_lines(out / SAMPLES)
    if out is None or not rows:
        return [], []
    types = {"document": pl.Int64, "layer": pl.Int64, "value": pl.Float64}
    attention = pl.read_csv(out / ATTENTION, schema_overrides=types)
    finished = {row["condition"] for row in rows}
    return rows, [attention.filter(pl.col("condition").is_in(finished))]


def table(conditions: Sequence[str], rows: pl.DataFrame, attention: pl.DataFrame) -> pl.DataFrame:
    """One row per task, metric and condition."""
    means = attention.group_by("task", "condition", maintain_order=True).agg(
        pl.col("value").filter(pl.col("measure") == name).mean().alias(name)
        for name in ATTENTION_COLUMNS
    )
    parts = []
    for (task, metric), some in rows.group_by("task", "metric", maintain_order=True):
        values = {
            name: some.filter(pl.col("condition") == name).sort("problem")["value"].to_numpy()
            for name in conditions
        }
        compared = compare_with_baseline(values)
        scores = {row["condition"]: row["score"] for row in some.iter_rows(named=True)}
        from_harness = [scores[name] for name in conditions]
        if not np.allclose(from_harness, compared["score"], atol=1e-9):
            # The score is not a mean over documents, so paired differences do not apply to it.
            nothing = [pl.lit(None, pl.Float64).alias(n) for n in ("low", "high", "p", "q")]
            change = pl.Series(
                "difference",
                [None if n == BASELINE else scores[n] - scores[BASELINE] for n in conditions],
            )
            compared = compared.with_columns(pl.Series("score", from_harness), change, *nothing)
        names = [pl.lit(task).alias("task"), pl.lit(metric).alias("metric")]
        parts.append(compared.select(*names, pl.all()))
    return pl.concat(parts).join(means, on=["task", "condition"], how="left", maintain_order="left")
