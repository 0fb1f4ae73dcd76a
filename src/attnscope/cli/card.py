"""`attnscope card`: one page about a model, or about two models side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.cli.options import Bos, Device, Dtype, Json, Quiet, on_disk
from attnscope.cli.output import print_json

if TYPE_CHECKING:
    from attnscope.card.numbers import Card
    from attnscope.run.store import Run


def card(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model: zoo:NAME, a hub id, a folder, a .gguf file, or BASE+ADAPTER; or the "
            "card.json of a finished card.",
        ),
    ],
    other: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A second model or card, to compare with."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The directory of cards. Each model has a folder in it.")
    ] = Path("cards"),
    bos: Bos = False,
    device: Device = None,
    dtype: Dtype = "auto",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Make the card of a model: one page about its attention, and card.json.

    Head types, attention sinks, massive activations, attention by token class, distance, entropy,
    and the attention of generated tokens, on fixed texts. With two models or cards: a page that
    compares them.
    """
    from attnscope.card.page import card_page
    from attnscope.card.store import CARD, check_comparable, is_card, read_card, write_card
    from attnscope.figures.export import write

    folder = on_disk(out)
    options = {"bos": bos, "device": device, "dtype": dtype}
    cards: list[Card] = []
    for name in [model] if other is None else [model, other]:
        if is_card(name):
            cards.append(read_card(name))
            continue
        one = _measure(name, folder, options, quiet=quiet or json)
        path = folder / one["label"]
        write_card(one, path / CARD)
        write(path / "card.html", card_page([one]).encode())
        if not json:
            print(f"{path / 'card.html'}, {CARD}")
        cards.append(one)
    if other is not None:
        check_comparable(*cards)
        both = folder / f"{cards[0]['label']}-{cards[1]['label']}.html"
        write(both, card_page(cards).encode())
        if not json:
            print(both)
    elif is_card(model):
        write(folder / f"{cards[0]['label']}.html", card_page(cards).encode())
        if not json:
            print(folder / f"{cards[0]['label']}.html")
    if json:
        print_json(cards)


def _measure(name: str, folder: Path, options: dict[str, Any], *, quiet: bool) -> Card:
    """Run the experiments of a card into its folder; finished ones are read again."""
    from functools import partial

    import attnscope
    from attnscope.card.experiments import card_experiments
    from attnscope.card.numbers import make_card
    from attnscope.cli.run_in_terminal import carry_out, no_bars, print_outcomes
    from attnscope.experiment.local import local
    from attnscope.experiment.plan import make_plan
    from attnscope.loading import load_text_model
    from attnscope.recipes.recipe_models import label_of

    no_bars()
    plans = {key: make_plan(one) for key, one in card_experiments(name, **options).items()}
    loaded, _ = load_text_model(name, **options)
    executor = partial(local, model=loaded)
    runs: dict[str, Run] = {}
    for key, plan in plans.items():
        where = folder / label_of(name) / "runs" / key
        outcome = carry_out(plan, where, quiet=quiet, executor=executor)
        if outcome.failed:
            print_outcomes({key: outcome}, json=False)
            sys.exit(1)
        runs[key] = attnscope.open_run(where)
    return make_card(runs)
