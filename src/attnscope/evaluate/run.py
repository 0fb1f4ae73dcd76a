"""One evaluation: a model, a task, some conditions. Answers are kept, and it can be continued."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.evaluate.completions import WhichSample, answers
from attnscope.evaluate.condition_parser import ParsedCondition, parse, spelled_out
from attnscope.evaluate.harness_run import evaluate_harness, is_harness
from attnscope.evaluate.intervention_effects import effects
from attnscope.evaluate.jsonl import read_lines, replace_whole, written_lines
from attnscope.evaluate.scores import BASELINE, table
from attnscope.evaluate.sweep import baseline_of, swept
from attnscope.evaluate.tasks import SEED, Task, task
from attnscope.figures.export import save
from attnscope.figures.mass_effect import mass_effect
from attnscope.figures.sweep import sweep
from attnscope.loading import load
from attnscope.tokens import apply_chat_template, tokenize_all

ANSWERS, ASKED, TABLE = "answers.jsonl", "evaluation.json", "table.csv"
EFFECTS = "effects.csv"
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is asked; kept beside the answers, so that others are not mixed with them."""

    model: str
    task: str = "math"
    problems: int = 100
    samples: int = 1
    temperature: float = 0.0
    seed: int = SEED
    level: int | None = None
    chat: bool | None = None
    """In the chat template; where there is one, if nobody says."""

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
    asked: Evaluation,
    conditions: Sequence[str],
    out: Path | None = None,
    *,
    k: int | None = None,
    batch: int = 32,
    progress: Report | None = None,
) -> pl.DataFrame:
    """The table of an evaluation. `out` keeps all answers; what is there is not asked again. A
    condition with bars, as arm:c=0.05|0.25, is several, and has a figure there."""
    written = dict.fromkeys(text for word in conditions for text in spelled_out(word))
    parsed = [parse(text) for text in written]
    if BASELINE not in [one.kind for one in parsed]:
        raise InputError(
            f"conditions are compared with {BASELINE!r}; add it to the conditions",
            code="no-baseline",
            conditions=list(written),
        )
    if is_harness(asked.task):
        _begin(asked, out)
        found = evaluate_harness(asked, parsed, out, batch=batch, progress=progress)
        return _written(asked, conditions, found, out)
    given = task(asked.task, asked.problems, seed=asked.seed, level=asked.level)
    kept = _kept(asked, out)
    missing = {one.name: _missing(one.name, len(given.samples), asked, kept) for one in parsed}
    if any(missing.values()):
        model, tokenizer = load(asked.model)
        prompts = _prompts(asked, given, tokenizer)
        for one in parsed:
            _answer(asked, one, given, model, tokenizer, prompts, missing[one.name], kept, out,
                    batch, progress)  # fmt: skip
    names = [one.name for one in parsed]
    judged = [line for line in kept if line["condition"] in names]
    judged.sort(key=lambda line: (names.index(line["condition"]), line["problem"], line["sample"]))
    found = table(pl.DataFrame(judged), k=asked.samples if k is None else k)
    return _written(asked, conditions, found, out)


def _written(
    asked: Evaluation, words: Sequence[str], found: pl.DataFrame, out: Path | None
) -> pl.DataFrame:
    """The table, written down with the figure of what was varied."""
    if out is None:
        return found
    found.write_csv(out / TABLE)
    metrics = found.partition_by("task", "metric") if "metric" in found.columns else [found]
    rows = swept(words, metrics[0])
    if rows is not None:
        of = f"{asked.model}, {asked.task}"
        if "metric" in found.columns:
            of = f"{of}, {found['metric'][0]}"
        save(sweep(rows, of=of, baseline=baseline_of(metrics[0])), out)
    return found


def measure_effects(
    asked: Evaluation,
    classes: Sequence[str],
    out: Path,
    *,
    layers: list[int] | None = None,
    progress: Report | None = None,
) -> pl.DataFrame:
    """Mass and effect of every head on these classes of tokens, with their figure in `out`."""
    given = task(asked.task, asked.problems, seed=asked.seed, level=asked.level)
    model, tokenizer = load(asked.model)
    prompts = _prompts(asked, given, tokenizer)
    found = effects(model, tokenizer, given, prompts, classes, layers=layers, progress=progress)
    out.mkdir(parents=True, exist_ok=True)
    found.write_csv(out / EFFECTS)
    save(mass_effect(found, of=f"{asked.model}, {asked.task}"), out)
    return found


def _begin(asked: Evaluation, out: Path | None) -> None:
    """Write down what is asked; what was asked here before must be the same."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    told, said = out / ASKED, (json.dumps(asdict(asked), indent=2) + "\n").encode()
    if not told.is_file():
        replace_whole(told, said)
    elif told.read_bytes() != said:
        raise InputError(
            f"{out} contains another evaluation (its settings: {told.name}); choose another "
            "directory, or use the same settings",
            code="other-evaluation",
            path=str(out),
        )


def _kept(asked: Evaluation, out: Path | None) -> list[dict[str, Any]]:
    """The answers that are there already."""
    _begin(asked, out)
    return [] if out is None else read_lines(out / ANSWERS)


def _missing(
    name: str, problems: int, asked: Evaluation, kept: list[dict[str, Any]]
) -> list[WhichSample]:
    there = {(line["problem"], line["sample"]) for line in kept if line["condition"] == name}
    every = [(n, sample) for n in range(problems) for sample in range(asked.samples)]
    return [one for one in every if one not in there]


def _prompts(asked: Evaluation, given: Task, tokenizer: Any) -> list[Any]:
    chat = bool(tokenizer.chat_template) if asked.chat is None else asked.chat
    prompts = [sample.prompt for sample in given.samples]
    if chat:
        prompts = [apply_chat_template(prompt, tokenizer) for prompt in prompts]
    return list(tokenize_all(prompts, tokenizer))


def _answer(
    asked: Evaluation,
    condition: ParsedCondition,
    given: Task,
    model: Any,
    tokenizer: Any,
    prompts: list[Any],
    missing: list[WhichSample],
    kept: list[dict[str, Any]],
    out: Path | None,
    batch: int,
    progress: Report | None,
) -> None:
    """Ask what is missing; every batch is written down before the next."""
    done = 0
    for some in answers(
        model,
        tokenizer,
        condition,
        prompts,
        missing,
        longest=given.longest,
        batch=batch,
        temperature=asked.temperature,
        seed=asked.seed,
    ):
        lines = [
            {
                "condition": condition.name,
                "problem": problem,
                "sample": sample,
                "right": given.right(given.samples[problem], said),
                "wanted": given.samples[problem].answer,
                "said": said,
            }
            for (problem, sample), said in some
        ]
        kept += lines
        if out is not None:
            with (out / ANSWERS).open("ab") as file:
                file.write(written_lines(lines))
        done += len(lines)
        if progress is not None:
            progress(condition.name, done, len(missing))
