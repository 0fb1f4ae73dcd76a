"""What is known of a model before it is loaded: its revision and its shape.

The revision is part of every cell's identity. Of a hub model it is the commit; of a folder, a
digest of the configuration and the weights. Weights are read whole up to 256 MiB a file; of larger
files, the size and 256 blocks spread evenly over them, which any training changes.

This module must not know prompts, cells or how anything is measured.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from attnscope.errors import InputError, ModelError
from attnscope.loading import load_config, source_of

__all__ = ["ModelFacts", "chosen_heads", "chosen_layers", "facts_of"]

WHOLE = 256 * 2**20
BLOCKS, BLOCK = 256, 64 * 2**10


@dataclass(frozen=True)
class ModelFacts:
    """A model by its configuration."""

    name: str
    revision: str
    architecture: str
    layers: int | None
    """None where the configuration does not say, as with the numbers below."""
    heads: int | None
    kv_heads: int | None
    bundled: bool
    """One of the zoo's: tiny, and trained by us."""


def facts_of(name: str) -> ModelFacts:
    """Ask the configuration and the files, not the weights."""
    config = load_config(name)
    folder = source_of(name)
    commit = getattr(config, "_commit_hash", None)
    if folder is None and not commit:
        raise ModelError(
            f"the hub does not say which revision of {name!r} this is, so a run could not be "
            "repeated; download it to a folder and give its path"
        )
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    return ModelFacts(
        name=name,
        revision=_digest_of(folder) if folder is not None else str(commit),
        architecture=(getattr(config, "architectures", None) or [type(config).__name__])[0],
        layers=getattr(text, "num_hidden_layers", None),
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        bundled=name.startswith("zoo:"),
    )


def chosen_layers(facts: ModelFacts, label: str, layers: Any) -> tuple[int, ...] | None:
    """The layers to measure; None for all of them. Refuses one the model does not have."""
    return _within(layers, facts.layers, f"model {label!r} ({facts.name})", "layer")


def chosen_heads(facts: ModelFacts, label: str, heads: Any) -> tuple[int, ...] | None:
    """The heads to store; None for all of them. Refuses one the model does not have."""
    return _within(heads, facts.heads, f"model {label!r} ({facts.name})", "head")


def _within(wanted: Any, there: int | None, whose: str, what: str) -> tuple[int, ...] | None:
    if wanted == "all":
        return None
    beyond = [n for n in wanted if there is not None and n >= there]
    if beyond:
        raise InputError(
            f"{whose} has no {what} {beyond[0]}: it has {what}s 0 to {(there or 0) - 1}"
        )
    return tuple(wanted)


@lru_cache(maxsize=64)
def _digest_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE:
                while block := file.read(2**20):
                    digest.update(block)
            else:
                for n in range(BLOCKS):
                    file.seek(n * (size - BLOCK) // (BLOCKS - 1))
                    digest.update(file.read(BLOCK))
    return digest.hexdigest()
