"""Shared by recipes: labels of models, and the published layers and heads."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnscope.errors import AttnscopeWarning, InputError, ModelError
from attnscope.spec.experiment import Experiment, make_experiment

Models = Mapping[str, str] | Sequence[str]
"""Names, or labels to names."""
SMOLLM2 = ("zoo:smollm2",)


def recipe(changes: Mapping[str, Any], /, **defaults: Any) -> Experiment:
    """The experiment of a recipe, with `changes` to its default keys."""
    return make_experiment(**{**defaults, **changes})


def with_the_first_three(layers: Any) -> Any:
    """The layers to measure: those shown, and the first three, which the paper compares."""
    if layers == "all":
        return layers
    shown = [layers] if isinstance(layers, int) else list(layers)
    return [*range(3), *(layer for layer in shown if layer not in range(3))]


def labelled(models: Models) -> dict[str, str]:
    """Label to name. A bare name is labelled by its last part: `zoo:chat-llama` by `chat-llama`."""
    if isinstance(models, Mapping):
        return dict(models)
    named = {label_of(name): name for name in models}
    if len(named) < len(models):
        raise InputError(
            f"two models have the same label ({', '.join(models)}); give labels: "
            "before=NAME,after=NAME",
            code="duplicate-name",
            names=list(models),
        )
    return named


def label_of(name: str) -> str:
    """The last part of a name; for a base with an adapter, that of the adapter."""
    last = name.rpartition("+")[2] if not Path(name).exists() else name
    return last.rstrip("/").replace(":", "/").rsplit("/", 1)[-1].removesuffix(".gguf")


def layers_of(models: Mapping[str, str], published: Sequence[int], of: int) -> list[int]:
    """The published layers; in a model that has fewer, those at the same depth."""
    depths = [_shape(name)[0] for name in models.values()]
    fewest = min((layers for layers in depths if layers), default=of)
    if max(published) < fewest:
        return list(published)
    layers_there = sorted({round(layer / (of - 1) * (fewest - 1)) for layer in published})
    warnings.warn(
        f"a model has {fewest} layers: layers {_listed(layers_there)} stand for the published "
        f"{_listed(published)} of {of}, at the same depth",
        AttnscopeWarning,
        stacklevel=3,
    )
    return layers_there


def heads_of(models: Mapping[str, str], published: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """For each model the published heads that it has; at least its first."""
    chosen = {}
    for label, name in models.items():
        heads = _shape(name)[1]
        chosen[label] = [n for n in published[label] if heads is None or n < heads] or [0]
        if len(chosen[label]) < len(published[label]):
            warnings.warn(
                f"{label} has {heads} heads: of the published {_listed(published[label])}, only "
                f"{_listed(chosen[label])} are shown",
                AttnscopeWarning,
                stacklevel=3,
            )
    return chosen


def begins(name: str) -> bool:
    """Whether a model's tokenizer has a begin-of-sequence token."""
    from attnscope.loading import load_tokenizer

    try:
        return load_tokenizer(name).bos_token is not None
    except ModelError:
        return False  # making the plan raises the error


def _shape(name: str) -> tuple[int | None, int | None]:
    """Layers and heads of a model. The bundled ones have their cards."""
    from attnscope import zoo
    from attnscope.loading import load_config

    bare = name.removeprefix(zoo.PREFIX)
    if name.startswith(zoo.PREFIX) and bare in (*zoo.names(), *zoo.adapters()):
        return zoo.card(bare).layers, zoo.card(bare).heads
    if name.startswith(zoo.PREFIX) and bare in zoo.FETCHED:
        return zoo.FETCHED[bare].layers, zoo.FETCHED[bare].heads
    try:
        text = load_config(name).get_text_config()
    except ModelError:
        return None, None  # making the plan raises the error
    return getattr(text, "num_hidden_layers", None), getattr(text, "num_attention_heads", None)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
