"""Evaluates a model on a task: an experiment that generates, whose completions are judged.

The experiment runs like any other, into a run directory; the attention of the queries that predict
the completion is measured meanwhile. The table `completions` of the run has the scores.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.evaluate.choices import best, choice_logprobs, probability
from attnscope.evaluate.conditions import parse_conditions
from attnscope.evaluate.intervention_effects import effects
from attnscope.evaluate.sweep import sweep_rows
from attnscope.evaluate.tasks import CHOICES, SEED, Task, answers_of, choices_of, find_task
from attnscope.experiment.execute import Outcome, run_plan
from attnscope.experiment.plan import Plan, make_plan
from attnscope.figures.export import save, write
from attnscope.figures.registry import draw_table
from attnscope.loading import load_text_model
from attnscope.report.scores import score_table
from attnscope.run.schemas import COMPLETIONS
from attnscope.run.store import Run, open_run
from attnscope.run.writer import open_directory
from attnscope.spec.experiment import Experiment, make_experiment

PREFIX = "lm-eval:"
_CELL = ("model", "prompt", "condition")
MEASURES = ("entropy", "first_token", "mass")
CarryOut = Callable[[Plan, Path], Outcome]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The settings of an evaluation."""

    model: str
    task: str = "math"
    problems: int = 100
    samples: int = 1
    temperature: float = 0.0
    seed: int = SEED
    level: int | None = None
    chat: bool | None = None
    """Use the chat template; default: if the tokenizer has one."""
    match: str = "exact"
    """The rule by which completions of a task from a file are judged."""
    classes: str = "default"
    """The class set of conditions and masses: a name or a YAML file."""
    device: str | None = None
    dtype: str = "auto"

    @property
    def placement(self) -> dict[str, Any]:
        """Where and in which precision the model is loaded."""
        return {"device": self.device, "dtype": self.dtype}

    @property
    def is_harness(self) -> bool:
        """Whether the task is one of lm-evaluation-harness: `lm-eval:NAME`, or a YAML file."""
        return self.task.startswith(PREFIX) or self.task.endswith((".yaml", ".yml"))

    def experiment(self, conditions: Sequence[str], **keys: Any) -> Experiment:
        """The experiment of this model under these conditions, each a word; `keys` are its own."""
        name = "".join(c if c.isalnum() else "-" for c in Path(self.task).stem).strip("-")
        return make_experiment(
            name=f"evaluate-{name}",
            models=[self.model],
            chat="auto" if self.chat is None else self.chat,
            conditions={n: c.model_dump() for n, c in parse_conditions(conditions).items()},
            measures=MEASURES,
            classes=self.classes,
            **self.placement,
            **keys,
        )

    def experiment_of(self, conditions: Sequence[str], task: Task) -> Experiment:
        """The experiment of one of our own tasks."""
        if task.match == CHOICES:  # nothing is generated
            if self.samples > 1 or self.temperature != 0:
                raise InputError(
                    "--match choices compares likelihoods, so nothing is sampled; leave out "
                    "--samples and --temperature",
                    code="unsupported-argument",
                    samples=self.samples,
                    temperature=self.temperature,
                )
            return self.experiment(conditions, prompts=task.prompts, queries=["last"])
        generate: dict[str, Any] = {"max_new_tokens": task.max_new_tokens}
        if self.temperature != 0:
            generate |= {"sample": True, "temperature": self.temperature, "seed": self.seed}
        return self.experiment(
            conditions,
            prompts=task.prompts,
            repeats=self.samples,
            generate=generate,
            queries=["predicts:generated"],
        )

    def find_task(self) -> Task:
        """The task, if it is one of our own."""
        return find_task(
            self.task, self.problems, seed=self.seed, level=self.level, match=self.match
        )


def evaluate(
    evaluation: Evaluation,
    conditions: Sequence[str],
    out: Path | None = None,
    *,
    k: int | None = None,
    batch: int = 32,
    carry_out: CarryOut = run_plan,
) -> pl.DataFrame:
    """Run an evaluation and return its table of scores.

    `out` becomes a run directory with all completions; an interrupted evaluation continues there.
    A condition with bars, such as arm:c=0.05|0.25, stands for several, and `out` gets a figure of
    them. `batch` is the batch size of tasks of lm-evaluation-harness.
    """
    with _folder(out) as folder:
        if evaluation.is_harness:
            from attnscope.evaluate.harness_run import evaluate_harness

            evaluate_harness(evaluation, conditions, folder, batch=batch)
        else:
            _evaluate(evaluation, conditions, folder, carry_out)
        run = open_run(folder)
        scores = score_table(run, evaluation.samples if k is None else k)
        if out is not None:
            _draw_sweep(run, conditions, scores)
        return scores


@contextmanager
def _folder(out: Path | None) -> Any:
    if out is not None:
        yield out
        return
    with TemporaryDirectory(prefix="attnscope-") as folder:
        yield Path(folder)


def _plan(evaluation: Evaluation, conditions: Sequence[str], task: Task) -> Plan:
    plan = make_plan(evaluation.experiment_of(conditions, task))
    if plan.pictures is not None:
        raise InputError(
            "attnscope evaluate judges completions of text prompts, and these prompts have "
            "pictures; measure them with attnscope run",
            code="images-not-supported",
        )
    return plan


def _evaluate(
    evaluation: Evaluation, conditions: Sequence[str], folder: Path, carry_out: CarryOut
) -> None:
    """Run the experiment, judge its completions, and store the scores in the run."""
    task = evaluation.find_task()
    plan = _plan(evaluation, conditions, task)
    answers = answers_of(plan.experiment, task.match)
    choices = choices_of(plan.experiment) if task.match == CHOICES else []
    outcome = carry_out(plan, folder)
    if not outcome.complete:
        reason = next(iter(outcome.failed.values()), "it was stopped")
        raise InputError(
            f"{folder} has {outcome.cells - len(outcome.failed)} of {outcome.cells} completions: "
            f"{reason}. The same command continues",
            code="evaluation-incomplete",
            failed=len(outcome.failed),
        )
    run = open_run(folder)
    if choices and not run.completions.is_empty():
        return
    rows = _chosen(plan, run, task, answers, choices) if choices else _judged(run, task, answers)
    completions = pl.DataFrame(rows, schema=COMPLETIONS, orient="row")
    if completions.equals(run.completions):
        return
    with open_directory(folder, plan.stored) as directory:
        directory.write_completions(completions)
        directory.finish(plan.stored, [batch.id for batch in run.batches])


def _judged(run: Run, task: Task, answers: Sequence[str]) -> list[tuple[Any, ...]]:
    """The rows of `completions`: generated texts, judged by the task."""
    rows = []
    for *cell, text in run.cells.select(*_CELL, "generated").rows():
        answer = answers[cell[1]]
        value = float(task.right(answer, text))
        rows.append((*cell, task.name, task.metric, answer, text, value, None))
    return rows


def _chosen(
    plan: Plan, run: Run, task: Task, answers: Sequence[str], choices: Sequence[Sequence[str]]
) -> list[tuple[Any, ...]]:
    """The rows of `completions`: the most likely choice, and the probability of the answer."""
    logprobs, rows = choice_logprobs(plan, choices), []
    for cell in run.cells.select(*_CELL).rows():
        _, n, condition = cell
        values, of_prompt, answer = logprobs[n, condition], choices[n], answers[n]
        text = best(values, of_prompt)
        for metric, value in (
            (task.metric, float(text == answer)),
            ("probability", probability(values, of_prompt, answer)),
        ):
            rows.append((*cell, task.name, metric, answer, text, value, None))
    return rows


def _draw_sweep(run: Run, conditions: Sequence[str], scores: pl.DataFrame) -> None:
    """The figure of the settings that conditions vary, for the first metric."""
    _, task, metric = scores.select("model", "task", "metric").row(0)
    first = scores.filter(pl.col("task") == task, pl.col("metric") == metric)
    rows = sweep_rows(conditions, first)
    if rows is not None:
        of = f"{first['model'][0]}, {task}, {metric}"
        base = float(first.filter(pl.col("condition") == run.experiment.base)["score"][0])
        save(draw_table("sweep", rows, of=of, baseline=base), run.path / "figures")


def measure_effects(
    evaluation: Evaluation, classes: Sequence[str], out: Path, *, layers: list[int] | None = None
) -> pl.DataFrame:
    """Mass and effect of every head for these classes of tokens; writes their figure to `out`."""
    plan = _plan(evaluation, ["baseline"], evaluation.find_task())
    (of_model,) = plan.models
    model, _ = load_text_model(evaluation.model, device=evaluation.device, dtype=evaluation.dtype)
    prompts = [cell.tokens for cell in of_model.cells()]
    answers = answers_of(plan.experiment)
    class_set = next(iter(plan.experiment.classes.values()))
    frame = effects(model, of_model.tokenizer, prompts, answers, classes, class_set, layers=layers)
    write(out / "effects.csv", frame.write_csv().encode())
    save(draw_table("mass-effect", frame, of=f"{evaluation.model}, {evaluation.task}"), out)
    return frame
