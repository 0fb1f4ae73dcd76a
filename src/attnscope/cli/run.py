"""`attnscope run`, `merge` and `query`: run an experiment, join its parts, query its tables."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli.options import Json, Quiet, opened, without_none
from attnscope.cli.output import print_json, without_control
from attnscope.cli.run_in_terminal import carry_out, no_bars, print_outcomes
from attnscope.errors import InputError
from attnscope.paths import to_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnscope.experiment.class_counts import ClassCount
    from attnscope.experiment.executor import Executor
    from attnscope.experiment.plan import Plan
    from attnscope.experiment.shard import Shard as Part
    from attnscope.spec.claims import Claim
Claims = Annotated[
    Path | None,
    typer.Option(
        help="A YAML file of claims, stored in the run before it starts. Default: no claims."
    ),
]
Shard = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="Measure only part I of N (from 1), as in the example above. Default: all parts.",
    ),
]
Outside = Annotated[
    bool,
    typer.Option("--outside", help="Allow files outside the folder of the experiment."),
]
OnRay = Annotated[
    str | None,
    typer.Option(
        metavar="[ADDRESS]",
        help="Run on a Ray cluster: HOST:PORT or auto. Without an address: on this machine.",
    ),
]
OtherDevice = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, cuda:N, mps or auto. Default: as in the experiment."),
]
OtherDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="float32, bfloat16, float16 or auto. Default: as in the experiment."
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Workers for --ray. Default: one per GPU or processor."),
]
Mixed = Annotated[
    bool,
    typer.Option(
        "--mixed",
        help="Allow other hardware or package versions than at the start; recorded per batch.",
    ),
]
LoadWithin = Annotated[
    float, typer.Option(metavar="SECONDS", min=1, help="Time limit for loading a model.")
]

Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Validate the experiment and measure one batch of each model; print the plan with "
        "its time and memory, and what the prompts can decide. Nothing is stored.",
    ),
]


Extend = Annotated[
    bool,
    typer.Option(
        "--extend",
        help="Add the further prompts of the experiment to a finished run. Its cells stay as they "
        "are, and verdicts say how many prompts there were before.",
    ),
]


def run(
    file: Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="The experiment.")],
    out: Annotated[Path | None, typer.Option(help="The run directory. Default: runs/NAME.")] = None,
    check: Check = False,
    extend: Extend = False,
    claims: Claims = None,
    shard: Shard = None,
    ray: OnRay = None,
    workers: Workers = None,
    load_within: LoadWithin = 3600,
    mixed: Mixed = False,
    outside: Outside = False,
    device: OtherDevice = None,
    dtype: OtherDtype = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Run an experiment and write a run directory. The same command continues a stopped run.

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

    Eight jobs of a SLURM array, or eight processes, each with a part of the run:

        sbatch --array=1-8 --wrap 'attnscope run slashes.yaml --shard $SLURM_ARRAY_TASK_ID/8'
        torchrun --nproc-per-node 8 -m attnscope run slashes.yaml

    `attnscope merge` joins parts in separate directories or at remote addresses.

    docs/experiments.md lists all keys. Read the results with `attnscope query DIR "SELECT …"`, or
    in Python with attnscope.open_run(DIR).
    """
    from attnscope.experiment.extend import plan_run
    from attnscope.spec.claims import load_claims
    from attnscope.spec.experiment_yaml import read_experiment

    part = _part(shard, ray, extend=extend)
    replaced = without_none(device=device, dtype=dtype)
    experiment = read_experiment(file, outside=outside, replaced=replaced)
    frozen = None if claims is None else load_claims(claims)
    folder = _run_folder(part, to_path(out or Path("runs") / experiment.name), quiet=quiet or json)
    executor = _executor(folder, ray, workers, load_within=load_within, mixed=mixed)
    no_bars()
    plan, extends = plan_run(experiment, folder, extend=extend)
    if check:
        _print_plan(plan, frozen or (), load_within=load_within, quiet=quiet, json=json)
        return
    options = {"claims": frozen, "shard": part, "executor": executor, "mixed": mixed}
    outcome = carry_out(plan, folder, quiet=quiet or json, extends=extends, **options)
    print_outcomes({experiment.name: outcome}, json=json)


def _part(shard: str | None, ray: str | None, *, extend: bool) -> Part | None:
    """The part of the run that this process measures: that of --shard, or of torchrun."""
    from attnscope.experiment.shard import gpu_of_process, parse_shard, shard_of_process

    part = shard_of_process(os.environ)
    if extend and (part is not None or shard is not None):
        raise InputError("--extend and --shard exclude each other", code="conflicting-options")
    if part is None:
        return None if shard is None else parse_shard(shard)
    if shard is not None or ray is not None:
        raise InputError(
            "torchrun gives every process a part of the run already; leave out "
            + ("--shard" if shard is not None else "--ray"),
            code="conflicting-options",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu_of_process(os.environ)  # before torch is imported
    return part


def _run_folder(part: Part | None, run_dir: Path, *, quiet: bool) -> Path:
    """The directory of a run, or of a part of it."""
    folder = run_dir if part is None else part.folder_for(run_dir)
    if part is not None and folder != run_dir and not quiet:
        print(f"this part: {folder}; to join all parts: {part.merge_command(run_dir)}", flush=True)
    return folder


def _executor(
    folder: Path, ray: str | None, workers: int | None, *, load_within: float, mixed: bool
) -> Executor:
    from attnscope.experiment.local import local
    from attnscope.experiment.ray import on_ray

    if ray is not None:
        return on_ray(ray, folder, workers=workers, load_within=load_within, mixed=mixed)
    if workers is not None:
        raise InputError("--workers needs --ray", code="missing-option", option="ray")
    return partial(local, load_within=load_within)


def merge(
    parts: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="The directories of the parts.")
    ],
    out: Annotated[Path, typer.Option(help="The run directory of the result.")],
    json: Json = False,
) -> None:
    """Join the parts of a run (`run --shard`) that are in separate directories.

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
            "error: the run is not complete. Merge the missing parts too, or measure them: "
            f"attnscope run {joined.folder / 'experiment.yaml'} --out {joined.folder}",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def query(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.")],
    sql: Annotated[str, typer.Argument(metavar="SQL", help="The SQL query.")],
    json: Json = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the result as CSV.")] = False,
) -> None:
    """Query a run in SQL; the tables are listed below and in docs/runs.md.

    attnscope query runs/token-types "SELECT model, layer, item, avg(value) AS mass FROM values
    GROUP BY model, layer, item ORDER BY layer, model, item"
    """
    import polars as pl

    if json and csv:
        raise InputError("--json and --csv exclude each other", code="conflicting-options")
    result = opened(folder).sql(sql)
    if json:
        print(result.write_json())
        return
    if csv:
        if nested := [name for name, dtype in result.schema.items() if dtype.is_nested()]:
            raise InputError(
                f"the column {nested[0]!r} holds lists; leave it out, or use --json",
                code="unsupported-column",
                column=nested[0],
            )
        text = result.write_csv()
        print(without_control(text) if sys.stdout.isatty() else text, end="")
        return
    with pl.Config(
        tbl_rows=-1,
        tbl_cols=-1,
        tbl_width_chars=-1,
        fmt_str_lengths=80,
        tbl_hide_dataframe_shape=True,
        tbl_hide_column_data_types=True,
    ):
        print(without_control(str(result)))


def _print_plan(
    plan: Plan, claims: Sequence[Claim], *, load_within: float, quiet: bool, json: bool
) -> None:
    from dataclasses import asdict

    from attnscope.cli.check_claims import decides
    from attnscope.cli.experiment_summary import choices
    from attnscope.experiment.class_counts import class_counts
    from attnscope.experiment.estimate import estimate

    decided = list(decides(plan, claims))
    estimates, counts = estimate(plan, load_within=load_within), class_counts(plan)
    if json:
        plans, classes = [asdict(one) for one in estimates], [asdict(one) for one in counts]
        data = {"experiment": plan.stored.to_dict(), "plan": plans, "classes": classes}
        print_json({**data, "decides": decided})
        return
    if not quiet:
        print(*choices(plan.stored), "", *_class_lines(counts), "", sep="\n")
        print(*(one["text"] for one in decided), "", sep="\n")
    for one in estimates:
        memory = "" if one.bytes is None else f" and {one.bytes / 2**20:,.0f} MiB"
        print(
            f"{one.label}: {one.cells:,} cells, {one.tokens:,} tokens (longest {one.longest:,}), "
            f"{_many(one.batches, 'batch')}, {_many(one.passes, 'forward pass')}; "
            f"{one.parameters:,} parameters; about {_duration(one.seconds)}{memory}"
        )
    print(
        f"{plan.experiment.name}: {plan.size:,} cells, about "
        f"{_duration(sum(one.seconds for one in estimates))} on {plan.device}, without loading"
    )


def _many(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 'es'}"


def _class_lines(counts: Sequence[ClassCount]) -> Iterator[str]:
    """A heading for every class set and tokenizer, and a line for every class."""
    above = None
    for one in counts:
        if above != (one.models, one.classes):
            above = (one.models, one.classes)
            models = ", ".join(one.models)
            yield f"tokens per class of {one.classes!r} in the base prompts ({models})"
        lacking = ", ".join(map(str, one.without[:10]))
        if len(one.without) > 10:
            lacking += f" and {len(one.without) - 10} more"
        where = f"; none in prompts {lacking}" if one.without else ""
        if len(one.without) == one.prompts:
            where = "; in no prompt"
        yield f"  {one.name}: {one.tokens:,g} in {one.prompts - len(one.without)} prompts{where}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
