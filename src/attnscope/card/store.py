"""Reads and writes card.json, and checks that two cards can be compared."""

from __future__ import annotations

import json
from pathlib import Path

from attnscope.card.numbers import FORMAT, Card
from attnscope.errors import InputError
from attnscope.figures.export import write

CARD = "card.json"


def write_card(card: Card, path: Path) -> None:
    """Write a card as JSON, atomically."""
    write(path, (json.dumps(card, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def is_card(name: str) -> bool:
    """Whether a name is that of a card: a JSON file, or a directory with card.json."""
    path = Path(name)
    return path.suffix == ".json" or (path / CARD).is_file()


def read_card(name: str) -> Card:
    """The card of a file or of a directory."""
    path = Path(name)
    path = path / CARD if path.is_dir() else path
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} is not a readable card: {error}; `attnscope card MODEL` writes one",
            code="not-a-card",
            path=str(path),
        ) from error
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        value = card.get("format") if isinstance(card, dict) else None
        raise InputError(
            f"{path} has the format {value!r}, not {FORMAT!r}; make the card again with "
            "`attnscope card MODEL`",
            code="not-a-card",
            path=str(path),
            value=value,
        )
    return card


def check_comparable(a: Card, b: Card) -> None:
    """Refuse two cards with one label, or of different texts."""
    if a["label"] == b["label"]:
        raise InputError(
            f"both cards have the label {a['label']!r}; rename a folder or a file, or copy a "
            "card.json and change its label",
            code="duplicate-name",
            names=[a["label"], b["label"]],
        )
    for key, what in (("texts", "texts"), ("new_tokens", "length of completions")):
        if a["settings"][key] != b["settings"][key]:
            raise InputError(
                f"the cards of {a['label']} and {b['label']} have different {what}; make both "
                "with one version of attnscope",
                code="cards-differ",
                setting=key,
            )
