"""What recipes share: labels for models, and the layers that the paper's claims are about."""

from collections.abc import Mapping, Sequence
from typing import Any

from attnscope.errors import InputError

__all__ = ["labelled", "with_the_first_three"]


def with_the_first_three(layers: Any) -> Any:
    """The layers to measure: those shown, and the first three, which the paper compares."""
    if layers == "all":
        return layers
    shown = [layers] if isinstance(layers, int) else list(layers)
    return [*range(3), *(layer for layer in shown if layer not in range(3))]


def labelled(models: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Label to name. A bare name is labelled by its last part: `zoo:chat-llama` by `chat-llama`."""
    if isinstance(models, Mapping):
        return dict(models)
    named = {name.rstrip("/").replace(":", "/").rsplit("/", 1)[-1]: name for name in models}
    if len(named) < len(models):
        raise InputError(
            f"two of the models have the same last name ({', '.join(models)}); label them: "
            "before=NAME after=NAME"
        )
    return named
