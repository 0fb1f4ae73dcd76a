"""A watched forward pass of the layers alone: nobody reads the logits, and no cache is filled.

This module must not know what the numbers are for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from attnscope.capture import sites
from attnscope.capture.activations import Activations, record
from attnscope.capture.scope import Scope
from attnscope.capture.watch import watch


@contextmanager
def forward(
    model: Any,
    inputs: dict[str, Any],
    choices: Mapping[str, Any],
    *,
    layers: list[int] | None = None,
    activations: bool = False,
    **options: Any,
) -> Iterator[tuple[dict[str, Scope], Activations | None]]:
    """One scope for each of the choices of queries, and the activations, which are held inside the
    `with` alone."""
    base = sites.find(model).base
    if "use_cache" in inspect.signature(base.forward).parameters:
        inputs = {**inputs, "use_cache": False}
    scopes: dict[str, Scope] = {}
    with ExitStack() as undo:
        undo.enter_context(torch.no_grad())
        held = undo.enter_context(record(model, layers)) if activations else None
        for name, queries in choices.items():
            watching = watch(model, layers=layers, queries=queries, **options)
            scopes[name] = undo.enter_context(watching)
        base(**inputs)
        yield scopes, held
