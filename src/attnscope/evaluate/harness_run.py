"""An evaluation whose task is one of lm-evaluation-harness: its scores under conditions, paired by
document, with the attention beside them. A condition that is finished is not asked again."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from attnscope.errors import InputError
from attnscope.evaluate.condition_parser import ParsedCondition
from attnscope.evaluate.jsonl import read_lines, replace_whole, written_lines
from attnscope.evaluate.scores import BASELINE, compared
from attnscope.loading import load

PREFIX = "lm-eval:"
ATTENTION, SAMPLES = "attention.csv", "samples.jsonl"
BESIDE = ("entropy", "first_token")
"""What of the attention stands in the table itself."""


def is_harness(task: str) -> bool:
    """Whether a task is the harness's: one of its names, or a YAML file."""
    return task.startswith(PREFIX) or task.endswith((".yaml", ".yml"))


def evaluate_harness(
    asked: Any,
    conditions: Sequence[ParsedCondition],
    out: Path | None,
    *,
    batch: int,
    progress: Callable[[str, int, int], None] | None,
) -> pl.DataFrame:
    """The table of every metric: the harness's score, the difference from the baseline paired by
    document, and the attention from where an answer begins, mean over layers and documents."""
    from attnscope.evaluate.harness import ask, scored

    if asked.samples > 1 or asked.level is not None:
        raise InputError(
            "a task of lm-evaluation-harness sets samples and level itself; leave them out",
            code="unsupported-argument",
            samples=asked.samples,
            level=asked.level,
        )
    rows, seen = _kept(out)
    model: Any = None
    tokenizer: Any = None
    for condition in conditions:
        if condition.name in {row["condition"] for row in rows}:
            continue
        if model is None:
            model, tokenizer = load(asked.model)
        results, attention = ask(
            *(model, tokenizer, condition, asked.task.removeprefix(PREFIX)),
            problems=asked.problems,
            chat=bool(tokenizer.chat_template) if asked.chat is None else asked.chat,
            batch=batch,
            seed=asked.seed,
        )
        lines = [{"condition": condition.name, **row} for row in scored(results)]
        rows += lines
        name = pl.lit(condition.name).alias("condition")
        seen.append(attention.select(name, pl.all()))
        if out is not None:
            replace_whole(out / ATTENTION, pl.concat(seen).write_csv().encode())
            replace_whole(out / SAMPLES, written_lines(rows))  # last: then the condition is there
        if progress is not None:
            progress(condition.name, len(lines), len(lines))
    return table([one.name for one in conditions], pl.DataFrame(rows), pl.concat(seen))


def _kept(out: Path | None) -> tuple[list[dict[str, Any]], list[pl.DataFrame]]:
    """What is there of conditions that were finished."""
    rows = [] if out is None else read_lines(out / SAMPLES)
    if out is None or not rows:
        return [], []
    types = {"document": pl.Int64, "layer": pl.Int64, "value": pl.Float64}
    seen = pl.read_csv(out / ATTENTION, schema_overrides=types)
    there = {row["condition"] for row in rows}
    return rows, [seen.filter(pl.col("condition").is_in(there))]


def table(conditions: Sequence[str], rows: pl.DataFrame, seen: pl.DataFrame) -> pl.DataFrame:
    """A row for every task, metric and condition."""
    beside = seen.group_by("task", "condition", maintain_order=True).agg(
        pl.col("value").filter(pl.col("measure") == name).mean().alias(name) for name in BESIDE
    )
    parts = []
    for (task, metric), some in rows.group_by("task", "metric", maintain_order=True):
        wide = {
            name: some.filter(pl.col("condition") == name).sort("problem")["value"].to_numpy()
            for name in conditions
        }
        found = compared(wide)
        scores = {row["condition"]: row["score"] for row in some.iter_rows(named=True)}
        own = [scores[name] for name in conditions]
        if not np.allclose(own, found["score"], atol=1e-9):
            # Not a mean over documents, so their differences are not its difference.
            nothing = [pl.lit(None, pl.Float64).alias(n) for n in ("low", "high", "p", "q")]
            change = pl.Series(
                "difference",
                [None if n == BASELINE else scores[n] - scores[BASELINE] for n in conditions],
            )
            found = found.with_columns(pl.Series("score", own), change, *nothing)
        names = [pl.lit(task).alias("task"), pl.lit(metric).alias("metric")]
        parts.append(found.select(*names, pl.all()))
    return pl.concat(parts).join(
        beside, on=["task", "condition"], how="left", maintain_order="left"
    )
