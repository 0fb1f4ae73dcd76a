"""`attnscope evaluate`: the accuracy of a model on a task, under conditions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.cli.options import Device, Dtype, Json, Model, Quiet, numbers
from attnscope.cli.output import plain_table, print_json

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table

Task = Annotated[
    str,
    typer.Option(
        help="The task: math, spatial, a JSONL file with the fields prompt and answer, "
        "lm-eval:NAME of lm-evaluation-harness, or the YAML file of such a task."
    ),
]
MatchRule = Annotated[
    str,
    typer.Option(
        help="How a completion of a task from a file is judged: exact (it is the answer), "
        "starts-with, contains (the answer as whole words, in any case), regex (the answer is a "
        "pattern), or choices (the most likely of the record's choices; nothing is generated)."
    ),
]
Classes = Annotated[
    str,
    typer.Option(
        help="The class set of conditions and masses: default, maps, whole, or a YAML file."
    ),
]
Conditions = Annotated[
    str,
    typer.Option(
        help="Conditions, separated by spaces: baseline, filler:COUNT:UNIT@POSITION, "
        "arm:c=0.2,p1=90 (Activation Redistribution Module), knockout:CLASS@REGION, "
        "steer:CLASS@REGION:FACTOR. arm:c=0.05|0.25|0.45 means three conditions, and also draws "
        "a figure of the score against the value."
    ),
]
Effect = Annotated[
    str | None,
    typer.Option(
        help="Do not generate. Measure, for every head, the effect of its attention to these "
        "classes on the correct answer, and its mass: 'hash@maps star@maps'. Needs --out."
    ),
]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 decodes greedily.")]
Level = Annotated[
    int | None, typer.Option(help="Difficulty of math, 1 to 5. Default: cycle through all.")
]
Seed = Annotated[int, typer.Option(help="Random seed of the problems and of sampling.")]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Apply the chat template, or not. Default: apply it if the model has one.",
    ),
]
Layers = Annotated[
    str | None, typer.Option(help="Layers for --effect, such as 0,16,27. Default: all.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Run directory for all completions; the same command continues there. Default: none."
    ),
]


WIDE = 100
"""Columns of a terminal that shows entropy and first-token mass too."""


def evaluate(
    model: Model,
    task: Task = "math",
    match: MatchRule = "exact",
    classes: Classes = "default",
    conditions: Conditions = "baseline filler arm",
    problems: Annotated[int, typer.Option(help="Number of problems.")] = 100,
    samples: Annotated[int, typer.Option(help="Completions per problem, for pass@k.")] = 1,
    k: Annotated[int | None, typer.Option("-k", help="k of pass@k. Default: --samples.")] = None,
    temperature: Temperature = 0.0,
    level: Level = None,
    seed: Seed = 20_260,
    batch: Annotated[int, typer.Option(help="Batch size for tasks of lm-evaluation-harness.")] = 32,
    chat: Chat = None,
    effect: Effect = None,
    layers: Layers = None,
    out: Out = None,
    device: Device = None,
    dtype: Dtype = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure accuracy or pass@k under conditions, each paired with the baseline by problem.

    The run directory can be opened like any other: compare, query, report, serve.
    """
    from attnscope.cli.run_in_terminal import carry_out
    from attnscope.evaluate.evaluation import Evaluation
    from attnscope.evaluate.evaluation import evaluate as run_evaluation

    evaluation = Evaluation(
        model=model,
        task=task,
        match=match,
        classes=classes,
        problems=problems,
        samples=samples,
        temperature=temperature,
        seed=seed,
        level=level,
        chat=chat,
        device=device,
        dtype=dtype,
    )
    if effect is not None:
        _effects(evaluation, effect.split(), layers, out)
        return
    scores = run_evaluation(
        evaluation,
        conditions.split(),
        out,
        k=k,
        batch=batch,
        carry_out=lambda plan, folder: carry_out(plan, folder, quiet=quiet or as_json),
    )
    if as_json:
        print_json(scores.to_dicts())
        return
    print_scores(scores, k or samples)


def print_scores(scores: pl.DataFrame, k: int = 1) -> None:
    """Print a table of conditions for every model, task and metric."""
    from rich.console import Console

    console = Console()
    for part in scores.partition_by("model", "task", "metric") if scores.height else ():
        model, task, metric = part.select("model", "task", "metric").row(0)
        if metric.startswith("right") and "choices" not in metric:
            metric = metric.replace("right", f"pass@{k}", 1)
        title = f"{model} · {task} · {metric} · {part['problems'][0]} problems"
        console.print(score_table(part.to_dicts(), title, wide=console.width >= WIDE))


def _effects(evaluation: Any, classes: list[str], layers: str | None, out: Path | None) -> None:
    from attnscope.errors import InputError
    from attnscope.evaluate.evaluation import measure_effects

    if out is None:
        raise InputError(
            "--effect writes a table and a figure: give a directory with --out",
            code="missing-option",
            option="out",
        )
    chosen = numbers("layers", layers)
    effects = measure_effects(evaluation, classes, out, layers=chosen)
    print(f"{effects['problem'].n_unique()} problems: {out / 'mass-effect.png'}")


def score_table(rows: list[dict[str, Any]], title: str, *, wide: bool = False) -> Table:
    """A table of at most 80 columns: long names of conditions are folded, and p is left out. A
    `wide` one has the mean attention too."""
    table = plain_table(title, "condition")
    table.columns[0].overflow = "fold"
    table.collapse_padding = True
    attention = ("entropy", "first_token") if wide else ()
    numbers = ["q", *(name for name in attention if name in rows[0])]
    for name in ("score, 95 %", "difference, 95 %", *numbers):
        table.add_column(name.replace("_", " "), justify="right", no_wrap=name != "first_token")
    for row in rows:
        change = "" if row["difference"] is None else f"{row['difference']:+.3f}"
        if row["low"] is not None:
            change += f" [{row['low']:+.3f}, {row['high']:+.3f}]"
        cells = ["" if row[name] is None else f"{row[name]:.3f}" for name in numbers]
        score = f"{row['score']:.3f}"
        if row["score_low"] is not None:
            score += f" [{row['score_low']:.2f}, {row['score_high']:.2f}]"
        table.add_row(row["condition"], score, change, *cells)
    return table
