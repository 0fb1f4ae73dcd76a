"""`attnscope look` and `attnscope models`: a text in the terminal, and what it can be shown to."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli.options import BeyondPositions, Bos, Json, Model
from attnscope.cli.tables import plain_table, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from attnscope.zoo import Card


class Colour(StrEnum):
    """What `look` colours tokens by."""

    by_class = "class"
    by_attention = "attention"


def look(
    model: Model,
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT", help="The text to look at; - is stdin."),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the text from a file.")] = None,
    layer: Annotated[int | None, typer.Option(help="One layer, from 0; else the mean.")] = None,
    head: Annotated[int | None, typer.Option(help="One head, from 0; else the mean.")] = None,
    query: Annotated[str | None, typer.Option(help="One token's gaze: its index or text.")] = None,
    colour: Annotated[Colour, typer.Option(help="What colours mean.")] = Colour.by_class,
    classes: Annotated[str, typer.Option(help="Class set: default, or a YAML file.")] = "default",
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat template.")] = False,
    system: Annotated[
        str | None, typer.Option(help="A system prompt, in the chat template.")
    ] = None,
    bos: Bos = False,
    beyond_positions: BeyondPositions = False,
) -> None:
    """Where does the model look? Tokens in colour, and what each class of them receives."""
    from rich.console import Console

    import attnscope
    from attnscope.look import look as look_at
    from attnscope.tokens import Prompt, load_classes

    # Before a large model is loaded, what can be wrong without it.
    class_set = load_classes(classes)
    said = _text(text, file)
    Prompt(said)
    loaded, tokenizer = attnscope.load(model, bos=bos)
    seen = look_at(
        loaded,
        tokenizer,
        said,
        layer=layer,
        head=head,
        query=query,
        classes=class_set,
        colour=colour.value,
        chat=chat,
        system=system,
        beyond_positions=beyond_positions,
    )
    Console().print(seen)


def _text(text: str | None, file: Path | None) -> str:
    """What is to be looked at, from wherever it comes."""
    import sys

    from attnscope.errors import InputError

    if (text is None) == (file is None):
        raise InputError("give one text: TEXT, - (from stdin), or --file FILE")
    try:
        if file is not None:
            return file.read_text(encoding="utf-8")
        return sys.stdin.buffer.read().decode() if text == "-" else str(text)
    except OSError as error:
        raise InputError(f"cannot read {str(file)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{str(file or 'stdin')!r} is not UTF-8 text: {error.reason}") from error


def models(
    get: Annotated[
        str | None, typer.Option(metavar="NAME", help="Fetch a real model once, such as smollm2.")
    ] = None,
    json: Json = False,
) -> None:
    """The models of the zoo: bundled, or real and fetched once; and what the hub's cache holds."""
    from dataclasses import asdict

    from rich.console import Console

    from attnscope import zoo
    from attnscope.errors import unknown
    from attnscope.loading import cached, find
    from attnscope.loading.fetch import where

    if get is not None:
        bare = get.removeprefix(zoo.PREFIX)
        if bare not in zoo.FETCHED:
            raise unknown("model to fetch", get, zoo.FETCHED)
        print(f"{zoo.PREFIX}{bare} is in {find(zoo.PREFIX + bare).place}")
        return
    cards = [zoo.card(name) for name in (*zoo.names(), *zoo.adapters())]
    here = {name: where(name) for name in zoo.FETCHED}
    if json:
        real = [
            {**asdict(entry), "here": None if here[name] is None else str(here[name])}
            for name, entry in zoo.FETCHED.items()
        ]
        held = [{"name": name, "bytes": size} for name, size in cached()]
        print_json({"zoo": [asdict(card) for card in cards], "real": real, "cached": held})
        return
    console = Console()
    console.print(_table(cards, here))
    found = cached()
    console.print(f"In the hub's cache on this machine: {len(found) or 'no'} models")
    for name, size in found:
        console.print(f"  {name}  {size / 1e9:.2f} GB")


def _table(cards: list[Card], here: dict[str, Path | None]) -> Table:
    """One line a model: the real ones first."""
    from attnscope import zoo

    table = plain_table(
        "Models of the zoo: bundled are tiny ones, trained for attnscope",
        caption=f"Exact match on {cards[0].fresh_samples:,} fresh samples each; the cards "
        "(docs/zoo.md) say more.",
    )
    for column in ("name", "family", "layers × heads", "parameters", "exact match, or where"):
        table.add_column(column, no_wrap=not column.startswith("exact"))
    for name, entry in zoo.FETCHED.items():
        state = "here" if here[name] else f"not here yet: attnscope models --get {name}"
        table.add_row(
            f"{zoo.PREFIX}{name}",
            entry.architecture.removesuffix("ForCausalLM"),
            f"{entry.layers} × {entry.heads}",
            f"{entry.parameters / 1e6:.1f} M",
            f"{entry.title}, {state}",
        )
    for card in sorted(cards, key=lambda card: card.base is None):
        shares = " ".join(f"{100 * share:.0f}" for share in card.exact_match.values())
        of_what = "actions" if len(card.exact_match) == 1 else "levels 1–5:"
        on_top = f" (on {zoo.PREFIX}{card.base})" if card.base else ""
        table.add_row(
            f"{zoo.PREFIX}{card.name}",
            card.architecture.removesuffix("ForCausalLM"),
            f"{card.layers} × {card.heads}",
            f"{'+' if card.base else ''}{card.parameters / 1e6:.1f} M",
            f"{of_what} {shares} %{on_top}",
        )
    return table
