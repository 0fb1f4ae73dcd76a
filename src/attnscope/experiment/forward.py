"""A measured forward pass of the layers alone, without logits and without a KV cache."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from attnscope.capture import sites
from attnscope.capture.layer_activations import Activations, capture_activations
from attnscope.capture.record import Limits, limits_of, summing_tokens
from attnscope.capture.scope import Scope
from attnscope.capture.token_sums import TokenSums
from attnscope.capture.watch import watch


@contextmanager
def forward(
    model: Any,
    inputs: dict[str, Any],
    choices: Mapping[str, Any],
    *,
    layers: list[int] | None = None,
    activations: bool = False,
    limits: Limits | None = None,
    **options: Any,
) -> Iterator[tuple[dict[str, Scope], Activations | None, dict[int, TokenSums]]]:
    """One scope for each of the choices of queries; the activations, which are held inside the
    `with` alone; and, where there are limits to count them by, what MLPs made."""
    base, inputs = _layers_alone(model, inputs)
    scopes: dict[str, Scope] = {}
    with ExitStack() as undo:
        undo.enter_context(torch.no_grad())
        held = undo.enter_context(capture_activations(model, layers)) if activations else None
        for name, queries in choices.items():
            watching = watch(model, layers=layers, queries=queries, **options)
            scopes[name] = undo.enter_context(watching)
        tallies: dict[int, TokenSums] = {}
        if limits is not None:
            tallies = undo.enter_context(summing_tokens(model, layers, limits))
        base(**inputs)
        yield scopes, held, tallies


@torch.no_grad()
def thresholds(model: Any, inputs: dict[str, Any], layers: list[int] | None) -> Limits:
    """What near zero and large mean for these sequences: a pass of its own, since what an
    activation is compared with is not known before all of them are."""
    base, inputs = _layers_alone(model, inputs)
    with summing_tokens(model, layers) as tallies:
        base(**inputs)
    return limits_of(tallies)


def _layers_alone(model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    base = sites.find(model).base_model
    if "use_cache" in inspect.signature(base.forward).parameters:
        inputs = {**inputs, "use_cache": False}
    return base, inputs
