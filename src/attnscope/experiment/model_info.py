"""What is known of a model before it is loaded: its revision and its shape.

The revision is part of every cell's identity. Of a hub model it is the commit; of a folder or a
file, a digest of all that is read of it; with an adapter, those of both.
"""

from dataclasses import dataclass
from typing import Any

from attnscope import zoo
from attnscope.errors import InputError
from attnscope.loading import find, load_config


@dataclass(frozen=True)
class ModelInfo:
    """A model by its configuration."""

    name: str
    pinned: str
    """The name with the commit that was found: what is loaded is what was looked at."""
    revision: str
    architecture: str
    layers: int | None
    """None where the configuration does not say, as with the numbers below."""
    heads: int | None
    kv_heads: int | None
    bundled: bool
    """One of the zoo's: tiny, and trained by us."""


def model_info(name: str) -> ModelInfo:
    """Ask the configuration and the files, not the weights."""
    source = find(name)
    config = load_config(source.pinned)
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    return ModelInfo(
        name=name,
        pinned=source.pinned,
        revision=source.revision,
        architecture=(getattr(config, "architectures", None) or [type(config).__name__])[0],
        layers=getattr(text, "num_hidden_layers", None),
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        bundled=name in {f"{zoo.PREFIX}{one}" for one in zoo.names()},
    )


def check_numbers(info: ModelInfo, label: str, what: str, numbers: Any) -> tuple[int, ...] | None:
    """The layers to measure, or the heads to store; None for all of them. Refuses one that the
    model does not have."""
    if numbers == "all":
        return None
    count = info.layers if what == "layer" else info.heads
    beyond = [n for n in numbers if count is not None and n >= count]
    if beyond:
        raise InputError(
            f"model {label!r} ({info.name}) has no {what} {beyond[0]}: it has {what}s 0 to "
            f"{(count or 0) - 1}",
            code=f"unknown-{what}",
            value=beyond[0],
            model=label,
            count=count,
        )
    return tuple(numbers)
