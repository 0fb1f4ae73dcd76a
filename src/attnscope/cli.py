"""The command line: parse, call, print. Everything else is somewhere below.

A command is a function under `@app.command()`. What a user got wrong is an `AttnscopeError`: its
message is printed alone and the exit code is 2. A traceback means a bug.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.errors import AttnscopeError, InputError, unknown

if TYPE_CHECKING:
    from attnscope.experiment.plan import Plan
    from attnscope.experiment.run import Outcome

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Where does a language model's attention go?",
)


class Colour(StrEnum):
    """What `look` colours tokens by."""

    by_class = "class"
    by_attention = "attention"


@app.callback()
def _commands() -> None:
    """Where does a language model's attention go?"""


@app.command()
def look(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Bundled (zoo:NAME), hub id or folder.")
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text to look at.")],
    layer: Annotated[int | None, typer.Option(help="One layer, from 0; else the mean.")] = None,
    head: Annotated[int | None, typer.Option(help="One head, from 0; else the mean.")] = None,
    query: Annotated[str | None, typer.Option(help="One token's gaze: its index or text.")] = None,
    colour: Annotated[Colour, typer.Option(help="What colours mean.")] = Colour.by_class,
    classes: Annotated[str, typer.Option(help="Class set: default, or a YAML file.")] = "default",
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat template.")] = False,
) -> None:
    """Where does the model look? Tokens in colour, and what each class of them receives."""
    from rich.console import Console

    import attnscope
    from attnscope.look import look as look_at
    from attnscope.tokens import Prompt, load_classes

    # Before a large model is loaded, what can be wrong without it.
    class_set = load_classes(classes)
    Prompt(text)
    loaded, tokenizer = attnscope.load(model)
    seen = look_at(
        loaded,
        tokenizer,
        text,
        layer=layer,
        head=head,
        query=query,
        classes=class_set,
        colour=colour.value,
        chat=chat,
    )
    Console().print(seen)


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command()
def run(
    file: Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="What to measure.")],
    out: Annotated[
        Path | None, typer.Option(help="The run directory; runs/NAME by default.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only validate, and print the plan.")
    ] = False,
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

    docs/experiments.md has all keys. Read the results with `attnscope query DIR "SELECT …"`, or
    in Python with attnscope.open_run(DIR).
    """
    from attnscope.experiment.plan import make_plan
    from attnscope.experiment.reading import read_experiment

    experiment = read_experiment(file)
    _no_bars()
    plan = make_plan(experiment)
    if check:
        _print_plan(plan, quiet=quiet, json=json)
        return
    outcome = _carry_out(plan, out or Path("runs") / experiment.name, quiet=quiet or json)
    _print_outcomes({experiment.name: outcome}, json=json)


@app.command()
def reproduce(
    recipe: Annotated[
        str | None,
        typer.Argument(help="token-types, filler-profile or filler-vs-sentence; all by default."),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(help="Model, or LABEL=MODEL, in place of the recipe's; once for each."),
    ] = None,
    prompts: Annotated[int, typer.Option(help="How many prompts; 1 is as published.")] = 64,
    queries: Annotated[
        str | None, typer.Option(help="all, last, after:REGION, region:REGION, sample:K; or a,b.")
    ] = None,
    keys: Annotated[str | None, typer.Option(help="all, not-first, a region; or a,b.")] = None,
    layers: Annotated[
        str | None, typer.Option(help="all, or 0,1,2; from 0. Filler recipes: of profiles.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="all, or 0,1,7; from 0. Filler recipes: of profiles.")
    ] = None,
    classes: Annotated[str | None, typer.Option(help="default, maps, a YAML file; or a,b.")] = None,
    normalise: Annotated[
        str | None, typer.Option(help="mass, per-token, share or lift: what is shown of mass.")
    ] = None,
    out: Annotated[Path, typer.Option(help="A directory for the runs.")] = Path("runs"),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Reproduce published figures: run their experiments, on the bundled models or on others.

    Without options: all recipes, 64 prompts each, on the bundled models. With real ones:

        attnscope reproduce filler-profile --models Qwen/Qwen2.5-Math-7B-Instruct

        attnscope reproduce token-types --models base=Qwen/Qwen2.5-1.5B-Instruct --models
        tuned=FOLDER --queries last
    """
    from attnscope.experiment.plan import make_plan
    from attnscope.experiment.telling import choices
    from attnscope.recipes import RECIPES

    if recipe is not None and recipe not in RECIPES:
        raise unknown("recipe", recipe, RECIPES)
    if recipe is None and (models or heads or layers or keys):
        raise InputError(
            "models, layers, heads and keys belong to one recipe; say which: "
            f"attnscope reproduce {next(iter(RECIPES))} … (known: {', '.join(RECIPES)})"
        )
    given = _without_none(
        models=_labelled(models),
        queries=_listed(queries),
        keys=_listed(keys),
        layers=_numbers(layers),
        heads=_numbers(heads),
        classes=_listed(classes),
        normalise=normalise,
    )
    _no_bars()
    outcomes = {}
    for name in [recipe] if recipe is not None else list(RECIPES):
        experiment = RECIPES[name](prompts=prompts, **given)
        if not (quiet or json):
            print(f"{name}: {RECIPES[name].__doc__}", *choices(experiment), sep="\n  ")
        plan = make_plan(experiment)
        outcomes[name] = _carry_out(plan, out / name, quiet=quiet or json)
    _print_outcomes(outcomes, json=json)


@app.command()
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

    from attnscope.experiment.store import open_run

    answer = open_run(folder).sql(sql)
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
        print(answer)


@app.command()
def compare(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    over: Annotated[
        str | None, typer.Option(help="model or condition; else models if they are two.")
    ] = None,
    pair: Annotated[
        str | None, typer.Option(help="FIRST,SECOND of what is compared: second against first.")
    ] = None,
    combine: Annotated[
        str | None, typer.Option(help="Heads: mean, sum, max or each; else as the experiment says.")
    ] = None,
    normalise: Annotated[
        str | None, typer.Option(help="Masses: mass, per-token, share or lift; else as above.")
    ] = None,
    claims: Annotated[
        str | None, typer.Option(help="A YAML file of claims, in place of the built-in ones.")
    ] = None,
    sensitivity: Annotated[
        str | None, typer.Option(help="A claim to judge again under every choice the run allows.")
    ] = None,
    json: Json = False,
) -> None:
    """Is the difference real? Paired statistics of a run, and verdicts on claims about it."""
    import os

    from rich.console import Console

    from attnscope.experiment.store import open_run
    from attnscope.stats import on_run, printing
    from attnscope.stats.claims import built_in, load_claims

    two = tuple(pair.split(",")) if pair is not None else None
    if two is not None and len(two) != 2:
        raise InputError(f"--pair {pair}: two names with a comma between them, first and second")
    judged = built_in() if claims is None else load_claims(claims)
    varied = [claim for claim in judged if claim.name == sensitivity]
    if sensitivity is not None and not varied:
        raise unknown("claim", sensitivity, [claim.name for claim in judged])
    opened = open_run(run)
    several = len(opened.experiment["models"]) > 1 or len(opened.experiment["conditions"]) > 1
    compared = (
        on_run.compare_run(opened, over=over, pair=two, combine=combine, normalise=normalise)
        if several
        else None
    )
    models = None if two is None or two[0] not in opened.experiment["models"] else two
    verdicts = on_run.judge_run(opened, judged, pair=models)
    choices = on_run.sensitivity_of_run(opened, varied[0], pair=models) if varied else None
    if json:
        print(printing.as_json(compared, verdicts, choices))
    else:
        console = Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = 160  # into a file or a pipe: nobody says how wide that is
        console.print(printing.as_tables(compared, verdicts, choices))


def _carry_out(plan: Plan, folder: Path, *, quiet: bool) -> Outcome:
    """Run a plan with its progress on the terminal; Ctrl-C leaves it to be continued."""
    from attnscope.experiment.progress import shown
    from attnscope.experiment.run import run_plan

    try:
        with shown(plan.experiment.name, plan.size, quiet=quiet) as progress:
            return run_plan(plan, folder, progress=progress)
    except KeyboardInterrupt:
        print(
            f"stopped. What is finished is kept in {folder}; the same command continues there.",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None


def _print_outcomes(outcomes: dict[str, Outcome], *, json: bool) -> None:
    if json:
        told = [
            {"name": name, "out": str(o.folder), "cells": o.cells, "measured": o.measured}
            for name, o in outcomes.items()
        ]
        _print_json(told)
        return
    for name, outcome in outcomes.items():
        already = outcome.cells - outcome.measured
        there = f" ({already} were there already)" if already else ""
        print(f"{name}: {outcome.cells} cells{there} in {outcome.folder}")


def _print_plan(plan: Plan, *, quiet: bool, json: bool) -> None:
    from dataclasses import asdict

    from attnscope.experiment.telling import choices, estimate

    found = estimate(plan)
    if json:
        _print_json({"experiment": plan.experiment.complete(), "plan": [asdict(f) for f in found]})
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


def _print_json(content: Any) -> None:
    from json import dumps

    print(dumps(content, indent=1, ensure_ascii=False))


def _without_none(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",")]


def _numbers(text: str | None) -> Any:
    parts = _listed(text)
    if parts is None or parts == ["all"]:
        return text
    return [int(part) if part.isdecimal() else part for part in parts]


def _labelled(models: list[str] | None) -> dict[str, str] | list[str] | None:
    if not models or not any("=" in model for model in models):
        return models or None
    pairs = [model.partition("=") for model in models]
    return {label: name or label for label, _, name in pairs}


def _no_bars() -> None:
    """Only our own progress: transformers draws a bar for every model it loads."""
    from transformers.utils import logging

    logging.disable_progress_bar()


RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The directory of a run.")]
Models = Annotated[list[str] | None, typer.Option("--model", help="Only this model.")]
Layers = Annotated[list[int] | None, typer.Option("--layer", help="Only this layer, from 0.")]
Heads = Annotated[
    list[str] | None, typer.Option("--head", help="Only this head, from 0; or MODEL=HEAD.")
]
Conditions = Annotated[list[str] | None, typer.Option("--condition", help="Only this condition.")]
Prompts = Annotated[list[int] | None, typer.Option("--prompt", help="Only this prompt, from 0.")]
Items = Annotated[list[str] | None, typer.Option("--class", help="Only this class of tokens.")]
Queries = Annotated[str | None, typer.Option(help="Which queries, where the run has several.")]
Keys = Annotated[str | None, typer.Option(help="Which keys, where the run has several.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="OPTION=VALUE", help="An option of the figure's own."),
]
ThemeName = Annotated[str, typer.Option(help="Colours: published, or safe for the colour-blind.")]


@app.command()
def figure(
    run: RunArgument,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Which; else all it can draw.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Where to; else RUN/figures.")] = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="png, svg, pdf, html, csv, md; else all.")
    ] = None,
    models: Models = None,
    layers: Layers = None,
    heads: Heads = None,
    conditions: Conditions = None,
    prompts: Prompts = None,
    items: Items = None,
    queries: Queries = None,
    keys: Keys = None,
    title: Annotated[str | None, typer.Option(help="Another title.")] = None,
    width: Annotated[float | None, typer.Option(help="Of a row of panels, in pixels.")] = None,
    height: Annotated[float | None, typer.Option(help="Of a panel, in pixels.")] = None,
    theme: ThemeName = "published",
    dark: Annotated[bool, typer.Option("--dark", help="On a dark background.")] = False,
    settings: Settings = None,
) -> None:
    """Draw figures of a run: each as PNG, SVG, PDF, HTML, CSV and a description.

    Without a NAME, every figure that the run has the numbers for. Names: token-types,
    filler-profile, filler-vs-sentence, effect-heads, classes, lift, lambda, lambda-length, flow,
    depth, text, sensitivity.
    """
    from attnscope.experiment.store import open_run
    from attnscope.figures import draw, drawable, save

    opened = open_run(run)
    options = _options(
        settings,
        models=models,
        layers=layers,
        heads=_heads(heads),
        conditions=conditions,
        prompts=prompts,
        items=items,
        queries=queries,
        keys=keys,
        title=title,
        width=width,
        height=height,
    )
    folder = Path(out) if out is not None else Path(run) / "figures"
    if names:
        for name in names:
            for path in save(
                draw(opened, name, theme=theme, dark=dark, **options), folder, formats
            ):
                print(path)
        return
    drawn, missing = drawable(opened, theme=theme, dark=dark, **options)
    for one in drawn:
        for path in save(one, folder, formats):
            print(path)
    for name, why in missing.items():
        print(f"not drawn: {name}: {why}", file=sys.stderr)


@app.command()
def describe(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A figure, such as token-types.")],
    models: Models = None,
    layers: Layers = None,
    heads: Heads = None,
    conditions: Conditions = None,
    prompts: Prompts = None,
    items: Items = None,
    queries: Queries = None,
    keys: Keys = None,
    settings: Settings = None,
) -> None:
    """Say in words what a figure of a run shows: every value, extremes, what holds up."""
    from attnscope.experiment.store import open_run
    from attnscope.figures import draw

    options = _options(
        settings,
        models=models,
        layers=layers,
        heads=_heads(heads),
        conditions=conditions,
        prompts=prompts,
        items=items,
        queries=queries,
        keys=keys,
    )
    drawn = draw(open_run(run), name, **options)
    print(f"## {drawn.title}\n\n{drawn.caption}\n\n{drawn.description}")


@app.command()
def report(
    run: RunArgument,
    out: Annotated[str | None, typer.Option(help="Where to; else RUN/report.html.")] = None,
    theme: ThemeName = "published",
) -> None:
    """Write the report of a run: one HTML file with figures, tables and how to repeat it."""
    from attnscope.experiment.store import open_run
    from attnscope.report import write_report

    path = Path(out) if out is not None else Path(run) / "report.html"
    print(write_report(open_run(run), path, theme=theme))


def _heads(asked: list[str] | None) -> list[int] | dict[str, int] | None:
    """`3` or `LABEL=3`."""
    if asked is None:
        return None
    try:
        if any("=" in head for head in asked):
            pairs = [head.rpartition("=") for head in asked]
            return {label: int(head) for label, _, head in pairs}
        return [int(head) for head in asked]
    except ValueError:
        raise InputError(
            f"--head takes a number, or MODEL=NUMBER, not {', '.join(asked)}"
        ) from None


def _options(settings: list[str] | None, **given: Any) -> dict[str, Any]:
    """What was given, with `--set OPTION=VALUE` read as YAML would."""
    import yaml

    options = {name: value for name, value in given.items() if value is not None}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set takes OPTION=VALUE, not {setting!r}")
        options[name.replace("-", "_")] = yaml.safe_load(value)
    return options


@app.command()
def models(
    json: Json = False,
) -> None:
    """The bundled tiny models with their measured accuracy, and what the hub's cache holds."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from attnscope import zoo
    from attnscope.loading import cached

    cards = [zoo.card(name) for name in zoo.names()]
    if json:
        held = [{"name": name, "bytes": size} for name, size in cached()]
        _print_json({"zoo": [asdict(card) for card in cards], "cached": held})
        return
    table = Table(title="Bundled models (tiny, trained for attnscope)", title_justify="left")
    for column in ("name", "architecture", "layers × heads", "parameters", "exact match"):
        table.add_column(column)
    for card in cards:
        shares = ", ".join(f"{what} {share:.0%}" for what, share in card.exact_match.items())
        table.add_row(
            f"{zoo.PREFIX}{card.name}",
            card.architecture.removesuffix("ForCausalLM"),
            f"{card.layers} × {card.heads}",
            f"{card.parameters / 1e6:.1f} M",
            f"{shares} ({card.fresh_samples:,} fresh samples each)",
        )
    console = Console()
    console.print(table)
    found = cached()
    console.print(f"In the hub's cache on this machine: {len(found) or 'no'} models")
    for name, size in found:
        console.print(f"  {name}  {size / 1e9:.2f} GB")


def main() -> None:
    """The program `attnscope`."""
    try:
        app()
    except AttnscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
