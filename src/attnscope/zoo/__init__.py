"""The zoo: tiny models with real architectures, trained by us and bundled with the package.

They are there so that everything runs at once, offline: `attnscope.load("zoo:spatial-phys")`. Each
is a folder as the hub lays it out, with a card (README.md) whose head holds its figures.
`training/` makes them. This module must not know how models are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from attnscope.errors import ModelError

__all__ = ["PREFIX", "Card", "card", "folder", "name_of", "names"]

PREFIX = "zoo:"
_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is known of a bundled model."""

    name: str
    architecture: str
    layers: int
    heads: int
    kv_heads: int
    parameters: int
    bytes: int
    format: str
    """The chat format."""
    data: str
    documents: int
    steps: int
    task: str
    """What the exact match was measured on."""
    fresh_samples: int
    exact_match: dict[str, float]
    """Share of exact answers on fresh samples, by difficulty."""
    about: str
    """The card itself, as Markdown."""


@cache
def names() -> tuple[str, ...]:
    """The bundled models, without the prefix."""
    return tuple(sorted(path.parent.name for path in _HERE.glob("*/config.json")))


def folder(name: str) -> Path:
    """Where a bundled model lies; the name with or without its prefix."""
    bare = name.removeprefix(PREFIX)
    if bare not in names():
        known = ", ".join(f"{PREFIX}{one}" for one in names())
        raise ModelError(f"unknown bundled model {PREFIX + bare!r}; known: {known}")
    return _HERE / bare


def name_of(path: str) -> str | None:
    """The name of a bundled model by its folder; None for any other path."""
    found = Path(path)
    return f"{PREFIX}{found.name}" if found.parent == _HERE else None


@cache
def card(name: str) -> Card:
    """The card of a bundled model."""
    text = (folder(name) / "README.md").read_text(encoding="utf-8")
    _, head, about = text.split("---\n", 2)
    facts: dict[str, Any] = yaml.safe_load(head)["attnscope"]
    return Card(about=about.strip(), **facts)
