"""`attnscope evaluate`: does a model answer right, and what does a condition change about it?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.cli.options import Json, Model, numbers
from attnscope.cli.tables import plain_table, print_json

if TYPE_CHECKING:
    from rich.table import Table

Task = Annotated[
    str,
    typer.Option(
        help="math, spatial, a file with the fields prompt and answer; of "
        "lm-evaluation-harness lm-eval:NAME, or the YAML file of a task."
    ),
]
Conditions = Annotated[
    str,
    typer.Option(
        help="Separated by spaces: baseline, filler:COUNT:UNIT@POSITION, arm:c=0.2,p1=90, "
        "knockout:CLASS@REGION, steer:CLASS@REGION:FACTOR; arm:c=0.05|0.25|0.45 is three, "
        "and draws how much it matters."
    ),
]
Effect = Annotated[
    str | None,
    typer.Option(
        help="In place of answers, what every head's attention to these classes does for the "
        "right one, beside its mass: 'hash@maps star@maps', into --out."
    ),
]


def evaluate(
    model: Model,
    task: Task = "math",
    conditions: Conditions = "baseline filler arm",
    problems: Annotated[int, typer.Option(help="How many.")] = 100,
    samples: Annotated[int, typer.Option(help="Answers to every problem, for pass@k.")] = 1,
    k: Annotated[int | None, typer.Option("-k", help="Of pass@k; by default, samples.")] = None,
    temperature: Annotated[float, typer.Option(help="0 answers greedily.")] = 0.0,
    level: Annotated[int | None, typer.Option(help="Of math: 1 to 5; all in turn if not.")] = None,
    seed: Annotated[int, typer.Option(help="Of the problems and the draws.")] = 20_260,
    batch: Annotated[int, typer.Option(help="Answers at once.")] = 32,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="The chat template; if there is one.")
    ] = None,
    effect: Effect = None,
    layers: Annotated[str | None, typer.Option(help="Of --effect: 0,16,27; all if not.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep all answers here; continues where it stopped.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Accuracy or pass@k under conditions, each against the baseline, paired by problem."""
    from rich.console import Console

    from attnscope.evaluate.run import Evaluation
    from attnscope.evaluate.run import evaluate as ask

    asked = Evaluation(
        model=model,
        task=task,
        problems=problems,
        samples=samples,
        temperature=temperature,
        seed=seed,
        level=level,
        chat=chat,
    )
    if effect is not None:
        _effects(asked, effect.split(), layers, out)
        return
    found = ask(asked, conditions.split(), out, k=k, batch=batch, progress=_said)
    if as_json:
        print_json(found.to_dicts())
        return
    console = Console()
    for part in found.partition_by("task", "metric") if "metric" in found.columns else [found]:
        of = part["metric"][0] if "metric" in found.columns else f"pass@{k or samples}"
        whose = part["task"][0] if "task" in found.columns else task
        title = f"{model} · {whose} · {of} · {part['problems'][0]} problems"
        console.print(_table(part.to_dicts(), title))


def _effects(asked: Any, classes: list[str], layers: str | None, out: Path | None) -> None:
    from attnscope.errors import InputError
    from attnscope.evaluate.run import measure_effects

    if out is None:
        raise InputError("--effect writes a table and a figure: say where with --out")
    chosen = numbers("layers", layers)
    found = measure_effects(asked, classes, out, layers=chosen, progress=_said)
    print(f"{found['problem'].n_unique()} problems: {out / 'mass-effect.png'}")


def _said(condition: str, done: int, of: int) -> None:
    print(f"{condition}: {done}/{of} answers", file=sys.stderr, flush=True)


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    """Within 80 columns: what is too long of a condition's name goes on below, and where attention
    stands beside the scores there is no p, which the file has."""
    table = plain_table(title, "condition")
    table.columns[0].overflow = "fold"
    table.collapse_padding = True
    beside = [name for name in ("entropy", "first_token") if name in rows[0]]
    tested = ["q", *beside] if beside else ["p", "q"]
    for name in ("score", "difference, 95 %", *tested):
        table.add_column(name.replace("_", " "), justify="right", no_wrap=name not in beside)
    for row in rows:
        change = "" if row["difference"] is None else f"{row['difference']:+.3f}"
        if row["low"] is not None:
            change += f" [{row['low']:+.3f}, {row['high']:+.3f}]"
        told = ["" if row[name] is None else f"{row[name]:.3f}" for name in tested]
        table.add_row(row["condition"], f"{row['score']:.3f}", change, *told)
    return table
