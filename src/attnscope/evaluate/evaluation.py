"""Runs one evaluation: a model on a task, under conditions; an interrupted one continues."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.evaluate.completions import SampleKey, generate_completions
from attnscope.evaluate.condition_parser import ParsedCondition, expand, parse
from attnscope.evaluate.harness_run import evaluate_harness, is_harness
from attnscope.evaluate.intervention_effects import effects
from attnscope.evaluate.jsonl import read_lines, to_lines, write_atomically
from attnscope.evaluate.scores import BASELINE, table
from attnscope.evaluate.sweep import baseline_of, sweep_rows
from attnscope.evaluate.tasks import SEED, Task, load_task
from attnscope.figures.export import save
from attnscope.figures.mass_effect import mass_effect
from attnscope.figures.sweep import sweep
from attnscope.loading import load
from attnscope.tokens import apply_chat_template, tokenize_all

COMPLETIONS, SETTINGS, TABLE = "completions.jsonl", "evaluation.json", "table.csv"
EFFECTS = "effects.csv"
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The settings of an evaluation; stored with its completions in `evaluation.json`."""

    model: str
    task: str = "math"
    problems: int = 100
    samples: int = 1
    temperature: float = 0.0
    seed: int = SEED
    level: int | None = None
    chat: bool | None = None
    """Use the chat template; default: if the tokenizer has one."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise InputError(
                f"samples={self.samples}: it must be at least 1",
                code="bad-samples",
                samples=self.samples,
            )
        if not 0 <= self.temperature < 100:
            raise InputError(
                f"temperature={self.temperature}: it must be at least 0 and below 100",
                code="bad-temperature",
                temperature=self.temperature,
            )
        if self.samples > 1 and self.temperature == 0:
            raise InputError(
                f"{self.samples} samples at temperature 0 are {self.samples} times the same "
                "completion; give a temperature such as 0.8",
                code="bad-temperature",
                temperature=self.temperature,
                samples=self.samples,
            )


def evaluate(
    evaluation: Evaluation,
    conditions: Sequence[str],
    out: Path | None = None,
    *,
    k: int | None = None,
    batch: int = 32,
    progress: Report | None = None,
) -> pl.DataFrame:
    """Run an evaluation and return its table.

    The directory `out` stores all completions; stored ones are not generated again. A condition
    with bars, such as arm:c=0.05|0.25, stands for several, and `out` gets a figure of them.
    """
    written = dict.fromkeys(text for condition in conditions for text in expand(condition))
    parsed = [parse(text) for text in written]
    if BASELINE not in [one.kind for one in parsed]:
        raise InputError(
            f"conditions are compared with {BASELINE!r}; add it to the conditions",
            code="no-baseline",
            conditions=list(written),
        )
    if is_harness(evaluation.task):
        _store_settings(evaluation, out)
        scores = evaluate_harness(evaluation, parsed, out, batch=batch, progress=progress)
        return _store_table(evaluation, conditions, scores, out)
    task = _task(evaluation)
    _store_settings(evaluation, out)
    stored = [] if out is None else read_lines(out / COMPLETIONS)
    missing = {
        one.name: _missing(one.name, len(task.samples), evaluation, stored) for one in parsed
    }
    if any(missing.values()):
        model, tokenizer = load(evaluation.model)
        prompts = _prompts(evaluation, task, tokenizer)
        for one in parsed:
            _complete(evaluation, one, task, model, tokenizer, prompts, missing[one.name], stored,
                      out, batch, progress)  # fmt: skip
    names = [one.name for one in parsed]
    judged = [line for line in stored if line["condition"] in names]
    judged.sort(key=lambda line: (names.index(line["condition"]), line["problem"], line["sample"]))
    scores = table(pl.DataFrame(judged), k=evaluation.samples if k is None else k)
    return _store_table(evaluation, conditions, scores, out)


def _store_table(
    evaluation: Evaluation, conditions: Sequence[str], scores: pl.DataFrame, out: Path | None
) -> pl.DataFrame:
    """Write the table, and the figure of the settings that vary."""
    if out is None:
        return scores
    scores.write_csv(out / TABLE)
    metrics = scores.partition_by("task", "metric") if "metric" in scores.columns else [scores]
    rows = sweep_rows(conditions, metrics[0])
    if rows is not None:
        of = f"{evaluation.model}, {evaluation.task}"
        if "metric" in scores.columns:
            of = f"{of}, {scores['metric'][0]}"
        save(sweep(rows, of=of, baseline=baseline_of(metrics[0])), out)
    return scores


def measure_effects(
    evaluation: Evaluation,
    classes: Sequence[str],
    out: Path,
    *,
    layers: list[int] | None = None,
    progress: Report | None = None,
) -> pl.DataFrame:
    """Mass and effect of every head for these classes of tokens; writes their figure to `out`."""
    task = _task(evaluation)
    model, tokenizer = load(evaluation.model)
    prompts = _prompts(evaluation, task, tokenizer)
    frame = effects(model, tokenizer, task, prompts, classes, layers=layers, progress=progress)
    out.mkdir(parents=True, exist_ok=True)
    frame.write_csv(out / EFFECTS)
    save(mass_effect(frame, of=f"{evaluation.model}, {evaluation.task}"), out)
    return frame


def _store_settings(evaluation: Evaluation, out: Path | None) -> None:
    """Write the settings to `out`; settings that are already there must be the same."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    file, content = out / SETTINGS, (json.dumps(asdict(evaluation), indent=2) + "\n").encode()
    if not file.is_file():
        write_atomically(file, content)
    elif file.read_bytes() != content:
        raise InputError(
            f"{out} contains another evaluation (its settings: {file.name}); choose another "
            "directory, or use the same settings",
            code="other-evaluation",
            path=str(out),
        )


def _task(evaluation: Evaluation) -> Task:
    return load_task(
        evaluation.task, evaluation.problems, seed=evaluation.seed, level=evaluation.level
    )


def _missing(
    name: str, problems: int, evaluation: Evaluation, stored: list[dict[str, Any]]
) -> list[SampleKey]:
    """The samples of a condition that have no stored completion."""
    done = {(line["problem"], line["sample"]) for line in stored if line["condition"] == name}
    every = [(n, sample) for n in range(problems) for sample in range(evaluation.samples)]
    return [one for one in every if one not in done]


def _prompts(evaluation: Evaluation, task: Task, tokenizer: Any) -> list[Any]:
    chat = bool(tokenizer.chat_template) if evaluation.chat is None else evaluation.chat
    prompts = [sample.prompt for sample in task.samples]
    if chat:
        prompts = [apply_chat_template(prompt, tokenizer) for prompt in prompts]
    return list(tokenize_all(prompts, tokenizer))


def _complete(
    evaluation: Evaluation,
    condition: ParsedCondition,
    task: Task,
    model: Any,
    tokenizer: Any,
    prompts: list[Any],
    missing: list[SampleKey],
    stored: list[dict[str, Any]],
    out: Path | None,
    batch: int,
    progress: Report | None,
) -> None:
    """Generate the missing completions; every batch is stored before the next one starts."""
    done = 0
    for some in generate_completions(
        model,
        tokenizer,
        condition,
        prompts,
        missing,
        max_new_tokens=task.max_new_tokens,
        batch=batch,
        temperature=evaluation.temperature,
        seed=evaluation.seed,
    ):
        lines = [
            {
                "condition": condition.name,
                "problem": problem,
                "sample": sample,
                "right": task.right(task.samples[problem], text),
                "answer": task.samples[problem].answer,
                "completion": text,
            }
            for (problem, sample), text in some
        ]
        stored += lines
        if out is not None:
            with (out / COMPLETIONS).open("ab") as file:
                file.write(to_lines(lines))
        done += len(lines)
        if progress is not None:
            progress(condition.name, done, len(missing))
