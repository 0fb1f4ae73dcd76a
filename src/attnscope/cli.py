"""The command line: parse, call, print. Everything else is somewhere below.

A command is a function under `@app.command()`. What a user got wrong is an `AttnscopeError`: its
message is printed alone and the exit code is 2. A traceback means a bug.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

from attnscope.errors import AttnscopeError, InputError

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
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id or local folder.")],
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
    depth, text.
    """
    from pathlib import Path

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
    from pathlib import Path

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


def main() -> None:
    """The program `attnscope`."""
    try:
        app()
    except AttnscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
