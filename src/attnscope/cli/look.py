"""`attnscope look` (the attention of one text) and `attnscope models` (the available models)."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.cli.options import BeyondPositions, Bos, Device, Dtype, Json, Model
from attnscope.cli.output import plain_table, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from attnscope.zoo import Card


class Keys(StrEnum):
    """The values of `look --keys`."""

    all = "all"
    not_first = "not-first"


class Colour(StrEnum):
    """The values of `look --color`."""

    by_class = "class"
    by_attention = "attention"


Query = Annotated[
    str | None,
    typer.Option(
        help="Show the attention row of one token: its index or its text. Default: all queries."
    ),
]
KeyOption = Annotated[
    Keys, typer.Option(help="all, or not-first: leave out attention to the first token.")
]
ColourOption = Annotated[
    Colour, typer.Option("--color", "--colour", help="Colour tokens by class or by attention.")
]


def look(
    model: Model,
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT", help="The text; - reads it from stdin."),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A file to read the text from.")] = None,
    layer: Annotated[
        int | None, typer.Option(help="One layer, from 0. Default: the mean over layers.")
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="One head, from 0. Default: the mean over heads.")
    ] = None,
    query: Query = None,
    keys: KeyOption = Keys.all,
    colour: ColourOption = Colour.by_class,
    classes: Annotated[
        str, typer.Option(help="The class set: default, maps, whole, or a YAML file.")
    ] = "default",
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    system: Annotated[
        str | None, typer.Option(help="A system prompt; implies the chat template. Default: none.")
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    bos: Bos = False,
    beyond_positions: BeyondPositions = False,
    json: Json = False,
) -> None:
    """Show where attention goes in a text: coloured tokens, and the mass of each token class."""
    from rich.console import Console

    from attnscope.loading import load_text_model
    from attnscope.look import look as look_at
    from attnscope.tokens import Prompt, load_classes

    # Check the options before loading a large model.
    class_set = load_classes(classes)
    prompt = _text(text, file)
    Prompt(prompt)
    loaded, tokenizer = load_text_model(model, device=device, dtype=dtype, bos=bos)
    _refuse_sound(loaded, model)
    result = look_at(
        loaded,
        tokenizer,
        prompt,
        layer=layer,
        head=head,
        query=query,
        keys=keys.value,
        classes=class_set,
        colour=colour.value,
        chat=chat,
        system=system,
        beyond_positions=beyond_positions,
    )
    if json:
        print_json(result.to_dict())
        return
    Console().print(result)


def _refuse_sound(loaded: Any, name: str) -> None:
    """Raise an error for a speech model, which cannot read a text alone."""
    from attnscope.errors import InputError

    if loaded.main_input_name == "input_features":
        raise InputError(
            f"{name} hears sound, and look gives it text alone; run: attnscope reproduce "
            f"alignment --models {name}",
            code="needs-sound",
            model=name,
        )


def _text(text: str | None, file: Path | None) -> str:
    """The text: the argument, stdin, or a file."""
    import sys

    from attnscope.errors import InputError

    if (text is None) == (file is None):
        raise InputError(
            "give exactly one text: TEXT, - (stdin), or --file FILE", code="bad-argument"
        )
    try:
        if file is not None:
            return file.read_text(encoding="utf-8")
        return sys.stdin.buffer.read().decode() if text == "-" else str(text)
    except OSError as error:
        raise InputError(
            f"cannot read {str(file)!r}: {error.strerror}", code="unreadable-file", path=str(file)
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{str(file or 'stdin')!r} is not UTF-8 text: {error.reason}",
            code="not-utf-8",
            path=str(file or "stdin"),
        ) from error


def models(
    get: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Download a real model, such as smollm2. Default: list."),
    ] = None,
    json: Json = False,
) -> None:
    """List the models of the zoo (bundled or downloadable) and of the hub's local cache."""
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
        print(f"{zoo.PREFIX}{bare} is in {find(zoo.PREFIX + bare).location}")
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
    local = cached()
    console.print(f"In the local cache of the hub: {len(local) or 'no'} models")
    for name, size in local:
        console.print(f"  {name}  {size / 1e9:.2f} GB")


def _table(cards: list[Card], here: dict[str, Path | None]) -> Table:
    """A table with one row per model; real models come first."""
    from attnscope import zoo

    table = plain_table(
        "Models of the zoo (bundled models are tiny and trained for attnscope)",
        caption=f"Exact match on {cards[0].fresh_samples:,} new samples each; see docs/zoo.md.",
    )
    for column in ("name", "family", "layers × heads", "parameters", "exact match, or status"):
        table.add_column(column, no_wrap=not column.startswith("exact"))
    for name, entry in zoo.FETCHED.items():
        state = "on this machine" if here[name] else f"to download: attnscope models --get {name}"
        table.add_row(
            f"{zoo.PREFIX}{name}",
            _family(entry.architecture),
            f"{entry.layers} × {entry.heads}",
            f"{entry.parameters / 1e6:.1f} M",
            f"{entry.title}, {state}",
        )
    for card in sorted(cards, key=lambda card: card.base is None):
        shares = " ".join(f"{100 * share:.0f}" for share in card.exact_match.values())
        tasks = "actions" if len(card.exact_match) == 1 else "levels 1–5:"
        if card.constant_answer is not None:
            tasks = f"{', '.join(card.exact_match)}:"
        on_top = f" (on {zoo.PREFIX}{card.base})" if card.base else ""
        table.add_row(
            f"{zoo.PREFIX}{card.name}",
            _family(card.architecture),
            f"{card.layers} × {card.heads}",
            f"{'+' if card.base else ''}{card.parameters / 1e6:.1f} M",
            f"{tasks} {shares} %{on_top}",
        )
    return table


def _family(architecture: str) -> str:
    """The name of an architecture without what it generates."""
    return architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
