"""`attnscope run`, `merge` and `query`: from a file to a run, and questions to it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli.options import Json, Quiet, opened
from attnscope.cli.run_in_terminal import carry_out, no_bars, print_outcomes
from attnscope.cli.tables import print_json, without_control
from attnscope.errors import InputError
from attnscope.paths import place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnscope.experiment.class_counts import ClassCount
    from attnscope.experiment.executor import Executor
    from attnscope.experiment.plan import Plan
    from attnscope.experiment.shard import Shard as Part
Claims = Annotated[
    Path | None,
    typer.Option(help="Claims of your own, written down with the run before it starts."),
]
Shard = Annotated[
    str | None,
    typer.Option(
        metavar="I/N", help="Only the I-th of N parts, from 1: one job of several (below)."
    ),
]
Outside = Annotated[
    bool,
    typer.Option("--outside", help="Let the experiment name files outside its own folder."),
]
OnRay = Annotated[
    str | None,
    typer.Option(
        metavar="[ADDRESS]",
        help="On a Ray cluster: HOST:PORT, auto, or one of this machine's own.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="With --ray: how many; one per GPU or processor by default."),
]
Mixed = Annotated[
    bool,
    typer.Option("--mixed", help="Let machines of other kinds or versions measure, on the record."),
]
LoadWithin = Annotated[
    float, typer.Option(metavar="SECONDS", min=1, help="How long a model may take to load.")
]


def run(
    file: Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="What to measure.")],
    out: Annotated[
        Path | None, typer.Option(help="The run directory; runs/NAME by default.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only validate, and print the plan.")
    ] = False,
    claims: Claims = None,
    shard: Shard = None,
    ray: OnRay = None,
    workers: Workers = None,
    load_within: LoadWithin = 3600,
    mixed: Mixed = False,
    outside: Outside = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Run an experiment into a directory. Started again, it continues where it stopped.

    A small experiment:

        name: slashes
        models: {qwen: zoo:math-qwen2}
        prompts: {source: math, count: 64}
        conditions:
          base: {}
          filler: {insert: {kind: repeat, unit: /, count: 55}}
        layers: [0]
        measures:
          - lambda
          - profile

    Eight jobs of a SLURM array, each a part of the run, in one directory:

        sbatch --array=1-8 --wrap 'attnscope run slashes.yaml --shard $SLURM_ARRAY_TASK_ID/8'

    Parts in directories, or at addresses, of their own are joined by `attnscope merge`.

    docs/experiments.md has all keys. Read the results with `attnscope query DIR "SELECT …"`, or
    in Python with attnscope.open_run(DIR).
    """
    from attnscope.experiment.plan import make_plan
    from attnscope.experiment.shard import parse_shard
    from attnscope.spec.claims import load_claims
    from attnscope.spec.experiment_yaml import read_experiment

    part = None if shard is None else parse_shard(shard)
    experiment = read_experiment(file, outside=outside)
    frozen = None if claims is None else load_claims(claims)
    folder = _own_place(part, place(out or Path("runs") / experiment.name), quiet=quiet or json)
    executor = _executor(folder, ray, workers, load_within=load_within, mixed=mixed)
    no_bars()
    plan = make_plan(experiment)
    if check:
        _print_plan(plan, quiet=quiet, json=json)
        return
    options = {"claims": frozen, "shard": part, "executor": executor, "mixed": mixed}
    outcome = carry_out(plan, folder, quiet=quiet or json, **options)
    print_outcomes({experiment.name: outcome}, json=json)


def _own_place(part: Part | None, whole: Path, *, quiet: bool) -> Path:
    """Where a run, or a part of it, is written."""
    folder = whole if part is None else part.place(whole)
    if part is not None and folder != whole and not quiet:
        print(f"this part: {folder}; when all are there: {part.joining(whole)}", flush=True)
    return folder


def _executor(
    folder: Path, ray: str | None, workers: int | None, *, load_within: float, mixed: bool
) -> Executor:
    from attnscope.experiment.local import local
    from attnscope.experiment.ray import on_ray

    if ray is not None:
        return on_ray(ray, folder, workers=workers, load_within=load_within, mixed=mixed)
    if workers is not None:
        raise InputError("--workers belongs to --ray")
    return partial(local, load_within=load_within)


def merge(
    parts: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="The parts of one run.")
    ],
    out: Annotated[Path, typer.Option(help="The run directory to join them in.")],
    json: Json = False,
) -> None:
    """Join the parts of a run (`run --shard`) that were measured into directories of their own.

    attnscope merge part-1 part-2 part-3 --out whole
    """
    from attnscope.run.merge import merge

    joined = merge(parts, out)
    for why in joined.damaged:
        print(f"warning: left out: {why}", file=sys.stderr)
    if json:
        print_json({"out": str(joined.folder), "batches": joined.batches, "of": joined.of})
    else:
        print(f"{joined.batches} of {joined.of} batches in {joined.folder}")
    if joined.batches < joined.of:
        print(
            "error: the run is not whole yet. Merge the parts that are missing too, or measure "
            f"the rest: attnscope run {joined.folder / 'experiment.yaml'} --out {joined.folder}",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def query(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.")],
    sql: Annotated[str, typer.Argument(metavar="SQL", help="What to ask.")],
    json: Json = False,
) -> None:
    """Ask a run in SQL, over the tables that are listed below (docs/runs.md).

    attnscope query runs/token-types "SELECT model, layer, item, avg(value) AS mass FROM values
    GROUP BY model, layer, item ORDER BY layer, model, item"
    """
    import polars as pl

    answer = opened(folder).sql(sql)
    if json:
        print(answer.write_json())
        return
    with pl.Config(
        tbl_rows=-1,
        tbl_cols=-1,
        tbl_width_chars=-1,
        fmt_str_lengths=80,
        tbl_hide_dataframe_shape=True,
        tbl_hide_column_data_types=True,
    ):
        print(without_control(str(answer)))


def _print_plan(plan: Plan, *, quiet: bool, json: bool) -> None:
    from dataclasses import asdict

    from attnscope.cli.estimate import estimate
    from attnscope.cli.experiment_summary import choices
    from attnscope.experiment.class_counts import class_counts

    found, counts = estimate(plan), class_counts(plan)
    if json:
        plans, classes = [asdict(one) for one in found], [asdict(one) for one in counts]
        asked = plan.experiment.complete()
        print_json({"experiment": asked, "plan": plans, "classes": classes})
        return
    if not quiet:
        print(*choices(plan.experiment), "", *_class_lines(counts), "", sep="\n")
    for one in found:
        print(
            f"{one.label}: {one.cells:,} cells, {one.tokens:,} tokens (longest {one.longest:,}), "
            f"{one.batches:,} batches, {one.passes:,} forward passes; {one.parameters:,} "
            f"parameters; about {_duration(one.seconds)} and {one.bytes / 2**20:,.0f} MiB"
        )
    print(
        f"{plan.experiment.name}: {plan.size:,} cells, about "
        f"{_duration(sum(one.seconds for one in found))} on {plan.device}, loading aside"
    )


def _class_lines(counts: Sequence[ClassCount]) -> Iterator[str]:
    """A line for every class, below one for every class set and tokenizer."""
    above = None
    for one in counts:
        if above != (one.models, one.classes):
            above = (one.models, one.classes)
            models = ", ".join(one.models)
            yield f"tokens of every class of {one.classes!r} in the base prompts ({models})"
        lacking = ", ".join(map(str, one.without[:10]))
        if len(one.without) > 10:
            lacking += f" and {len(one.without) - 10} more"
        where = f"; none in prompts {lacking}" if one.without else ""
        if len(one.without) == one.prompts:
            where = "; no prompt has one"
        yield f"  {one.name}: {one.tokens:,g} in {one.prompts - len(one.without)} prompts{where}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
