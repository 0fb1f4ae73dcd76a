"""`attnscope figure`, `describe` and `report`: a run as pictures, words and a page."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.cli.options import (
    Cluster,
    Strata,
    listed,
    numbers,
    on_disk,
    opened,
    units_of,
    without_none,
)
from attnscope.errors import InputError
from attnscope.figures.registry import FIGURES

if TYPE_CHECKING:
    from attnscope.figures import Drawing

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The directory of a run.")]
Models = Annotated[str | None, typer.Option(help="Only these models, by their labels: a,b.")]
Layers = Annotated[str | None, typer.Option(help="Only these layers, from 0: 0,16.")]
Heads = Annotated[
    str | None, typer.Option(help="Only these heads, from 0: 0,1,7; or one a model: A=0,B=26.")
]
Conditions = Annotated[str | None, typer.Option(help="Only these conditions: a,b.")]
Prompts = Annotated[str | None, typer.Option(help="Only these prompts, from 0: 0,1.")]
Items = Annotated[str | None, typer.Option(help="Only these classes of tokens: hash,star.")]
Queries = Annotated[str | None, typer.Option(help="Which queries, where the run has several.")]
Keys = Annotated[str | None, typer.Option(help="Which keys, where the run has several.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="OPTION=VALUE", help="An option of the figure's own."),
]
ThemeName = Annotated[str, typer.Option(help="Colours: published, or safe for the colour-blind.")]


def figure(
    run: RunArgument,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help=f"Which; else all that the run has the numbers for: {', '.join(FIGURES)}.",
        ),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Where to; else RUN/figures.")] = None,
    formats: Annotated[
        str | None, typer.Option(help="Some of png,svg,pdf,html,csv,md; else all.")
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
    cluster: Cluster = None,
    strata: Strata = None,
    theme: ThemeName = "published",
    dark: Annotated[bool, typer.Option("--dark", help="On a dark background.")] = False,
    settings: Settings = None,
) -> None:
    """Draw figures of a run: each as PNG, SVG, PDF, HTML, CSV and a description."""
    from attnscope.figures import draw, drawable, save

    source = opened(run)
    chosen = _choice(models, layers, heads, conditions, prompts, items, queries, keys)
    looks = without_none(title=title, width=width, height=height)
    options = {**chosen, **looks, **units_of(cluster, strata), **_settings(settings)}
    options |= {"theme": theme, "dark": dark}
    folder = on_disk(run) / "figures" if out is None else on_disk(out)
    missing: dict[str, str] = {}
    drawn: Iterable[Drawing] = (draw(source, name, **options) for name in names or ())
    if not names:
        drawn, missing = drawable(source, **options)
    for one in drawn:
        for path in save(one, folder, listed(formats)):
            print(path)
    for name, why in missing.items():
        print(f"not drawn: {name}: {why}", file=sys.stderr)


def describe(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(FIGURES)}.")],
    models: Models = None,
    layers: Layers = None,
    heads: Heads = None,
    conditions: Conditions = None,
    prompts: Prompts = None,
    items: Items = None,
    queries: Queries = None,
    keys: Keys = None,
    cluster: Cluster = None,
    strata: Strata = None,
    settings: Settings = None,
) -> None:
    """Say in words what a figure of a run shows: every value, extremes, what holds up."""
    from attnscope.figures import draw

    chosen = _choice(models, layers, heads, conditions, prompts, items, queries, keys)
    drawn = draw(
        opened(run), name, **{**chosen, **units_of(cluster, strata), **_settings(settings)}
    )
    print(f"## {drawn.title}\n\n{drawn.caption}\n\n{drawn.description}")


def report(
    run: RunArgument,
    out: Annotated[str | None, typer.Option(help="Where to; else RUN/report.html.")] = None,
    cluster: Cluster = None,
    strata: Strata = None,
    theme: ThemeName = "published",
) -> None:
    """Write the report of a run: one HTML file with figures, tables and how to repeat it."""
    from attnscope.report import write_report

    path = on_disk(run) / "report.html" if out is None else on_disk(out)
    print(write_report(opened(run), path, theme=theme, **units_of(cluster, strata)))


def _choice(
    models: str | None,
    layers: str | None,
    heads: str | None,
    conditions: str | None,
    prompts: str | None,
    items: str | None,
    queries: str | None,
    keys: str | None,
) -> dict[str, Any]:
    """What to show, as far as it was said."""
    return without_none(
        models=listed(models),
        layers=numbers("layers", layers),
        heads=_heads(heads),
        conditions=listed(conditions),
        prompts=numbers("prompts", prompts),
        items=listed(items),
        queries=queries,
        keys=keys,
    )


def _heads(asked: str | None) -> list[int] | dict[str, int] | None:
    """`0,1,7`, or one for each model: `A=0,B=26`."""
    if asked is None or "=" not in asked:
        return numbers("heads", asked)
    pairs = [head.rpartition("=") for head in listed(asked) or []]
    if not all(label and head.isdecimal() for label, _, head in pairs):
        raise InputError(f"--heads takes 0,1,7, or one head a model: A=0,B=26; not {asked!r}")
    return {label: int(head) for label, _, head in pairs}


def _settings(settings: list[str] | None) -> dict[str, Any]:
    """`--set OPTION=VALUE`, each value read as YAML would."""
    from attnscope.yaml_file import parse_yaml

    options: dict[str, Any] = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set takes OPTION=VALUE, not {setting!r}")
        name = name.replace("-", "_")
        if name in ("run", "name", "judged"):
            raise InputError(f"--set {setting}: {name} is not an option of a figure")
        options[name], _ = parse_yaml(value, f"--set {name}")
    return options
