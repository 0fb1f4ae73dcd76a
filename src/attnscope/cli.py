"""The command line: parse, call, print. Everything else is somewhere below.

A command is a function under `@app.command()`. What a user got wrong is an `AttnscopeError`: its
message is printed alone and the exit code is 2. A traceback means a bug.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from attnscope.errors import AttnscopeError

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


@app.command()
def compare(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    over: Annotated[
        str | None, typer.Option(help="model or condition; else models if there are several.")
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Is the difference real? Paired statistics of a run, and verdicts on claims about it."""
    from rich.console import Console

    from attnscope.errors import InputError, unknown
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
    if as_json:
        print(printing.as_json(compared, verdicts, choices))
    else:
        Console().print(printing.as_tables(compared, verdicts, choices))


def main() -> None:
    """The program `attnscope`."""
    try:
        app()
    except AttnscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
