"""`attnscope reproduce`: run a recipe, draw its figures and write its report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.cli.options import (
    BeyondPositions,
    Bos,
    Device,
    Dtype,
    Json,
    Quiet,
    listed,
    on_disk,
    without_none,
)
from attnscope.cli.run_in_terminal import carry_out, no_bars, print_outcomes
from attnscope.errors import InputError, unknown

if TYPE_CHECKING:
    from attnscope.experiment.execute import Outcome
    from attnscope.experiment.plan import Plan
    from attnscope.recipes import Recipe

OtherModels = Annotated[
    str | None,
    typer.Option(
        help="Models: NAME,NAME or LABEL=NAME,LABEL=NAME. Default: the models of the recipe."
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Argument(help="A recipe (see below). Default: all recipes on the bundled models."),
]
Prompts = Annotated[
    int | None,
    typer.Option(help="Number of prompts; published figures use 1. Default: by recipe."),
]
Queries = Annotated[
    str | None,
    typer.Option(
        help="Queries: all, last, after:REGION, region:REGION or sample:K; several: a,b. Default: "
        "by recipe."
    ),
]
Keys = Annotated[
    str | None,
    typer.Option(help="Keys: all, not-first, or a region; several: a,b. Default: by recipe."),
]
Layers = Annotated[
    str | None,
    typer.Option(
        help="Layers to measure, from 0: 0,1,2, or all. For filler recipes: layers whose per-token "
        "profile is stored. Default: by recipe."
    ),
]
Heads = Annotated[
    str | None,
    typer.Option(
        help="Heads to measure, from 0: 0,1,7, or all. For filler recipes: heads whose per-token "
        "profile is stored. Default: by recipe."
    ),
]
Classes = Annotated[
    str | None,
    typer.Option(
        help="Class sets: default, maps, whole, or a YAML file; several: a,b. Default: by recipe."
    ),
]
Normalise = Annotated[
    str | None,
    typer.Option(
        "--normalize",
        "--normalise",
        help="How figures show mass: mass, per-token, share or lift. Default: by recipe.",
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(help="Apply the chat template, or not. Default: apply it if the models have one."),
]
Real = Annotated[
    bool,
    typer.Option("--real", help="Use the real model SmolLM2 instead of the tiny bundled models."),
]


def reproduce(
    recipe: RecipeName = None,
    models: OtherModels = None,
    prompts: Prompts = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed of the prompts. Default: 0.")
    ] = None,
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
    device: Device = None,
    dtype: Dtype = "auto",
    out: Annotated[Path, typer.Option(help="The directory of the runs.")] = Path("runs"),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Reproduce published figures: run a recipe, draw its figures and write its report.

    Without options: three recipes with 64 prompts each, on the bundled models. On real models:

        attnscope reproduce filler-profile --models Qwen/Qwen2.5-Math-7B-Instruct

        attnscope reproduce token-types --models base=Qwen/Qwen2.5-1.5B-Instruct,tuned=FOLDER
    """
    from attnscope.experiment.plan import make_plan
    from attnscope.recipes import BUNDLED, RECIPES

    if recipe is not None and recipe not in RECIPES:
        raise unknown("recipe", recipe, RECIPES)
    if recipe is None and (models or heads or layers or keys):
        raise InputError(
            "--models, --layers, --heads and --keys need a recipe: "
            f"attnscope reproduce {next(iter(RECIPES))} … (known: {', '.join(RECIPES)})",
            code="missing-recipe",
        )
    options = without_none(
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
        device=device,
        dtype=None if dtype == "auto" else dtype,
    )
    if real and models:
        raise InputError(
            "--real and --models both choose the models; give one of them",
            code="conflicting-options",
        )
    no_bars()
    plans = {}  # all before the first is run: a model may be missing
    for name in [recipe] if recipe is not None else list(BUNDLED):
        chosen = {"models": RECIPES[name].real, **options} if real else options
        plans[name] = make_plan(RECIPES[name](**chosen))
    outcomes = {
        name: _reproduced(RECIPES[name], plan, out / name, quiet=quiet or json)
        for name, plan in plans.items()
    }
    print_outcomes(outcomes, json=json, drawn={n: list(RECIPES[n].figures) for n in outcomes})


def _reproduced(recipe: Recipe, plan: Plan, folder: Path, *, quiet: bool) -> Outcome:
    """Run the experiment of a recipe, draw its figures and write its report."""
    from attnscope.cli.experiment_summary import choices
    from attnscope.figures import draw, save
    from attnscope.figures.verdict_cache import VerdictCache
    from attnscope.report import write_report
    from attnscope.report.published import published_statistics
    from attnscope.run.store import open_run

    if not quiet:
        print(f"{recipe.name}: {recipe.description}", *choices(plan.stored), sep="\n  ")
    outcome = carry_out(plan, on_disk(folder), quiet=quiet, claims=recipe.claims)
    run = open_run(folder)
    verdict_cache = VerdictCache(run)
    if not quiet:
        for line in (*published_statistics(run), *verdict_cache.verdicts()):
            print(line)
        print(f"{recipe.name}: drawing the figure and writing the report", flush=True)
    drawn = {name: draw(run, name, verdict_cache=verdict_cache) for name in recipe.figures}
    for drawing in drawn.values():
        save(drawing, folder / "figures")
    write_report(run, folder / "report.html", verdict_cache=verdict_cache, drawn=drawn)
    return outcome


def _numbers(text: str | None) -> Any:
    parts = listed(text)
    if parts is None or parts == ["all"]:
        return text
    return [int(part) if part.isdecimal() else part for part in parts]


def _labelled(models: list[str] | None) -> dict[str, str] | list[str] | None:
    from attnscope.recipes.recipe_models import label_of

    if not models or not any("=" in model for model in models):
        return models or None
    pairs = [
        (label, name) if equals else (label_of(model), model)
        for model in models
        for label, equals, name in [model.partition("=")]
    ]
    for label, name in pairs:
        if not label or not name or [other for other, _ in pairs].count(label) > 1:
            raise InputError(
                f"--models: every model needs its own label, LABEL=NAME; not {label!r}",
                code="bad-option",
                option="models",
                value=label,
            )
    return dict(pairs)
