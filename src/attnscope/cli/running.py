"""`attnscope run`, `reproduce` and `query`: from a file to a run, and questions to it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.cli.carrying import carry_out, print_outcomes
from attnscope.cli.options import (
    BeyondPositions,
    Bos,
    Json,
    Quiet,
    listed,
    on_disk,
    opened,
    print_json,
    without_control,
    without_none,
)
from attnscope.errors import InputError, unknown
from attnscope.place import place

if TYPE_CHECKING:
    from attnscope.experiment.execute import Outcome
    from attnscope.experiment.executor import Executor
    from attnscope.experiment.plan import Plan
    from attnscope.experiment.shard import Shard as Part
    from attnscope.question.spec import Experiment
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
    from attnscope.question.claims import load_claims
    from attnscope.question.yaml import read_experiment

    part = None if shard is None else parse_shard(shard)
    experiment = read_experiment(file, outside=outside)
    frozen = None if claims is None else load_claims(claims)
    folder = _own_place(part, place(out or Path("runs") / experiment.name), quiet=quiet or json)
    executor = _executor(folder, ray, workers, load_within=load_within, mixed=mixed)
    _no_bars()
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


OtherModels = Annotated[
    str | None,
    typer.Option(help="In place of the recipe's models: NAME,NAME or LABEL=NAME,LABEL=NAME."),
]
Recipe = Annotated[
    str | None,
    typer.Argument(
        help="token-types, filler-profile, filler-vs-sentence (these three by default), sinks, "
        "induction, lookback, needle, drift, position or injection."
    ),
]
Prompts = Annotated[
    int | None,
    typer.Option(help="How many prompts; else the recipe's own number. 1 is as published."),
]
Queries = Annotated[
    str | None, typer.Option(help="all, last, after:REGION, region:REGION, sample:K; or a,b.")
]
Keys = Annotated[str | None, typer.Option(help="all, not-first, a region; or a,b.")]
Layers = Annotated[
    str | None, typer.Option(help="all, or 0,1,2; from 0. Filler recipes: of profiles.")
]
Heads = Annotated[
    str | None, typer.Option(help="all, or 0,1,7; from 0. Filler recipes: of profiles.")
]
Classes = Annotated[str | None, typer.Option(help="default, maps, whole, a YAML file; or a,b.")]
Normalise = Annotated[
    str | None, typer.Option(help="mass, per-token, share or lift: what is shown of mass.")
]
Chat = Annotated[
    bool | None, typer.Option(help="In the chat template, or plain; else as the models are made.")
]
Real = Annotated[
    bool, typer.Option("--real", help="On zoo:smollm2 and its fine-tune, not on the tiny models.")
]


def reproduce(
    recipe: Recipe = None,
    models: OtherModels = None,
    prompts: Prompts = None,
    seed: Annotated[int | None, typer.Option(help="Other prompts than those of seed 0.")] = None,
    queries: Queries = None,
    keys: Keys = None,
    layers: Layers = None,
    heads: Heads = None,
    classes: Classes = None,
    normalise: Normalise = None,
    chat: Chat = None,
    bos: Bos = False,
    beyond_positions: BeyondPositions = False,
    real: Real = False,
    out: Annotated[Path, typer.Option(help="A directory for the runs.")] = Path("runs"),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Reproduce published figures, on the bundled models or on others: run, draw, report.

    Without options: the first three, 64 prompts each, on the bundled models. With real ones:

        attnscope reproduce filler-profile --models Qwen/Qwen2.5-Math-7B-Instruct

        attnscope reproduce token-types --models base=Qwen/Qwen2.5-1.5B-Instruct,tuned=FOLDER
    """
    from attnscope.recipes import BUNDLED, REAL, RECIPES, figures_of

    if recipe is not None and recipe not in RECIPES:
        raise unknown("recipe", recipe, RECIPES)
    if recipe is None and (models or heads or layers or keys):
        raise InputError(
            "models, layers, heads and keys belong to one recipe; say which: "
            f"attnscope reproduce {next(iter(RECIPES))} … (known: {', '.join(RECIPES)})"
        )
    given = without_none(
        models=_labelled(listed(models)),
        queries=listed(queries),
        keys=listed(keys),
        layers=_numbers(layers),
        heads=_numbers(heads),
        classes=listed(classes),
        normalise=normalise,
        chat=chat,
        bos=bos or None,
        beyond_positions=beyond_positions or None,
        prompts=prompts,
        seed=seed,
    )
    if real and models:
        raise InputError("--real names the models, and --models others; give one of them")
    _no_bars()
    outcomes = {}
    for name in [recipe] if recipe is not None else list(BUNDLED):
        chosen = {"models": REAL[name], **given} if real and name in REAL else given
        experiment = RECIPES[name](**chosen)
        outcomes[name] = _reproduced(name, experiment, out / name, quiet=quiet or json)
    print_outcomes(outcomes, json=json, drawn={n: list(dict(figures_of(n))) for n in outcomes})


def _reproduced(name: str, experiment: Experiment, folder: Path, *, quiet: bool) -> Outcome:
    """A recipe from its experiment to its figure and report."""
    from attnscope.cli.choices import choices
    from attnscope.experiment.plan import make_plan
    from attnscope.figures import draw, save
    from attnscope.recipes import RECIPES, claims_of, figures_of
    from attnscope.report import write_report
    from attnscope.run.store import open_run
    from attnscope.stats.headline import told

    plan = make_plan(experiment)
    if not quiet:
        print(f"{name}: {RECIPES[name].__doc__}", *choices(plan.experiment), sep="\n  ")
    claims = claims_of(name)
    outcome = carry_out(plan, on_disk(folder), quiet=quiet, claims=claims or None)
    run = open_run(folder)
    if not quiet:
        print(*told(run, claims), sep="\n")
        print(f"{name}: drawing the figure and writing the report", flush=True)
    for figure, options in figures_of(name):
        save(draw(run, figure, **options), folder / "figures")
    write_report(run, folder / "report.html")
    return outcome


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
    """Ask a run in SQL. Its tables are values, positions, tokens and cells (docs/runs.md).

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

    from attnscope.cli.choices import choices
    from attnscope.cli.estimate import estimate

    found = estimate(plan)
    if json:
        print_json({"experiment": plan.experiment.complete(), "plan": [asdict(f) for f in found]})
        return
    if not quiet:
        print(*choices(plan.experiment), "", sep="\n")
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


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _numbers(text: str | None) -> Any:
    parts = listed(text)
    if parts is None or parts == ["all"]:
        return text
    return [int(part) if part.isdecimal() else part for part in parts]


def _labelled(models: list[str] | None) -> dict[str, str] | list[str] | None:
    from attnscope.recipes.names import label_of

    if not models or not any("=" in model for model in models):
        return models or None
    pairs = [
        (label, name) if equals else (label_of(model), model)
        for model in models
        for label, equals, name in [model.partition("=")]
    ]
    for label, name in pairs:
        if not label or not name or [other for other, _ in pairs].count(label) > 1:
            raise InputError(f"--models: give each a label of its own, LABEL=NAME; not {label!r}")
    return dict(pairs)


def _no_bars() -> None:
    """Only our own progress: transformers draws a bar for every model it loads."""
    from transformers.utils import logging

    logging.disable_progress_bar()
