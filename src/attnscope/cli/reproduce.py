"""`attnscope reproduce`: from a recipe to its figure and report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.cli.options import (
    BeyondPositions,
    Bos,
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
    from attnscope.spec.experiment import Experiment

OtherModels = Annotated[
    str | None,
    typer.Option(help="In place of the recipe's models: NAME,NAME or LABEL=NAME,LABEL=NAME."),
]
Recipe = Annotated[
    str | None,
    typer.Argument(help="One of the recipes below; without one, those of the bundled models."),
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
    """Reproduce published figures, on the zoo's models or on others: run, draw, report.

    Without options: three recipes, 64 prompts each, on the bundled models. With real ones:

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
    no_bars()
    outcomes = {}
    for name in [recipe] if recipe is not None else list(BUNDLED):
        chosen = {"models": REAL[name], **given} if real and name in REAL else given
        experiment = RECIPES[name](**chosen)
        outcomes[name] = _reproduced(name, experiment, out / name, quiet=quiet or json)
    print_outcomes(outcomes, json=json, drawn={n: list(dict(figures_of(n))) for n in outcomes})


def _reproduced(name: str, experiment: Experiment, folder: Path, *, quiet: bool) -> Outcome:
    """A recipe from its experiment to its figure and report."""
    from attnscope.cli.experiment_summary import choices
    from attnscope.experiment.plan import make_plan
    from attnscope.figures import draw, save
    from attnscope.recipes import RECIPES, claims_of, figures_of
    from attnscope.report import write_report
    from attnscope.run.store import open_run
    from attnscope.stats.published import told

    plan = make_plan(experiment)
    if not quiet:
        print(f"{name}: {RECIPES[name].__doc__}", *choices(plan.experiment), sep="\n  ")
    outcome = carry_out(plan, on_disk(folder), quiet=quiet, claims=claims_of(name))
    run = open_run(folder)
    if not quiet:
        print(*told(run), sep="\n")
        print(f"{name}: drawing the figure and writing the report", flush=True)
    for figure, options in figures_of(name):
        save(draw(run, figure, **options), folder / "figures")
    write_report(run, folder / "report.html")
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
            raise InputError(f"--models: give each a label of its own, LABEL=NAME; not {label!r}")
    return dict(pairs)
