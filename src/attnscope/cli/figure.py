"""`attnscope figure`, `describe` and `report`: figures, descriptions and the report of a run."""

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

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")]
Models = Annotated[
    str | None, typer.Option(help="Labels of the models to show: a,b. Default: all.")
]
Layers = Annotated[str | None, typer.Option(help="Layers to show, from 0: 0,16. Default: all.")]
Heads = Annotated[
    str | None,
    typer.Option(
        help="Heads to show, from 0: 0,1,7; or one head per model: A=0,B=26. Default: all."
    ),
]
Conditions = Annotated[str | None, typer.Option(help="Conditions to show: a,b. Default: all.")]
Prompts = Annotated[str | None, typer.Option(help="Prompts to show, from 0: 0,1. Default: all.")]
Items = Annotated[str | None, typer.Option(help="Token classes to show: hash,star. Default: all.")]
Queries = Annotated[
    str | None, typer.Option(help="The queries to show. Default: the first of the run.")
]
Keys = Annotated[str | None, typer.Option(help="The keys to show. Default: the first of the run.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="OPTION=VALUE",
        help="An option of the figure, such as whiskers=classes.",
    ),
]
ThemeName = Annotated[str, typer.Option(help="Colours: published, or safe (colour-blind readers).")]


def figure(
    run: RunArgument,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help=f"Names of figures. Default: all that the run has data for. Known: "
            f"{', '.join(FIGURES)}.",
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The output directory. Default: RUN/figures.")
    ] = None,
    formats: Annotated[
        str | None, typer.Option(help="File formats, of png,svg,pdf,html,csv,md. Default: all.")
    ] = None,
    models: Models = None,
    layers: Layers = None,
    heads: Heads = None,
    conditions: Conditions = None,
    prompts: Prompts = None,
    items: Items = None,
    queries: Queries = None,
    keys: Keys = None,
    title: Annotated[str | None, typer.Option(help="Title. Default: the figure's own.")] = None,
    width: Annotated[
        float | None, typer.Option(help="Width of a row of panels in pixels. Default: by figure.")
    ] = None,
    height: Annotated[
        float | None, typer.Option(help="Height of a panel in pixels. Default: by figure.")
    ] = None,
    cluster: Cluster = None,
    strata: Strata = None,
    theme: ThemeName = "published",
    dark: Annotated[bool, typer.Option("--dark", help="Use a dark background.")] = False,
    settings: Settings = None,
) -> None:
    """Draw figures of a run, each as PNG, SVG, PDF, HTML, CSV and a text description."""
    from attnscope.figures import draw, drawable, save

    source = opened(run)
    chosen = _choice(models, layers, heads, conditions, prompts, items, queries, keys)
    style = without_none(title=title, width=width, height=height)
    options = {**chosen, **style, **units_of(cluster, strata), **_settings(settings)}
    options |= {"theme": theme, "dark": dark}
    folder = on_disk(run) / "figures" if out is None else on_disk(out)
    missing: dict[str, str] = {}
    drawn: Iterable[Drawing] = (draw(source, name, **options) for name in names or ())
    if not names:
        drawn, missing = drawable(source, **options)
    for one in drawn:
        first, *others = save(one, folder, listed(formats))
        print(", ".join([str(first), *(path.suffix[1:] for path in others)]))
    if missing:
        why = (
            "not drawn, because the run lacks the numbers (`attnscope figure RUN NAME` says which)"
        )
        print(f"{why}: {', '.join(missing)}", file=sys.stderr)


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
    """Describe a figure of a run as text: its values, extremes and supported differences."""
    from attnscope.figures import draw

    chosen = _choice(models, layers, heads, conditions, prompts, items, queries, keys)
    drawn = draw(
        opened(run), name, **{**chosen, **units_of(cluster, strata), **_settings(settings)}
    )
    print(f"## {drawn.title}\n\n{drawn.caption}\n\n{drawn.description}")


def report(
    run: RunArgument,
    out: Annotated[
        str | None, typer.Option(help="The output file. Default: RUN/report.html.")
    ] = None,
    cluster: Cluster = None,
    strata: Strata = None,
    theme: ThemeName = "published",
) -> None:
    """Write the report of a run: one HTML file with figures, tables and commands."""
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
    """The selection of a figure: the options that are set."""
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


def _heads(text: str | None) -> list[int] | dict[str, int] | None:
    """Parse `0,1,7`, or one head per model: `A=0,B=26`."""
    if text is None or "=" not in text:
        return numbers("heads", text)
    pairs = [head.rpartition("=") for head in listed(text) or []]
    if not all(label and head.isdecimal() for label, _, head in pairs):
        raise InputError(
            f"--heads takes 0,1,7, or one head per model, A=0,B=26; not {text!r}",
            code="bad-option",
            option="heads",
            value=text,
        )
    return {label: int(head) for label, _, head in pairs}


def _settings(settings: list[str] | None) -> dict[str, Any]:
    """Parse `--set OPTION=VALUE`; values are YAML."""
    from attnscope.yaml_file import parse_yaml

    options: dict[str, Any] = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(
                f"--set takes OPTION=VALUE, not {setting!r}",
                code="bad-option",
                option="set",
                value=setting,
            )
        name = name.replace("-", "_")
        if name in ("run", "name", "judged"):
            raise InputError(
                f"--set {setting}: {name} is not an option of a figure",
                code="unknown-option",
                option=name,
            )
        options[name], _ = parse_yaml(value, f"--set {name}")
    return options
