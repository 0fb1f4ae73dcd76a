"""A watched forward pass under one choice of queries, read for the stored heads alone.

Shapes: B prompts, K tokens of the longest, S stored heads (of all layers, one after the other).

This module must not know what the numbers are for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from attnscope.capture import sites
from attnscope.capture.activations import Activations, record
from attnscope.capture.attention import watch
from attnscope.capture.scope import Scope
from attnscope.errors import InputError
from attnscope.experiment.plan import ModelPlan
from attnscope.experiment.readings import Array
from attnscope.experiment.texts import Text
from attnscope.question.spec import Experiment

__all__ = ["Pass", "Take", "forward"]

Take = Callable[[Activations], None]
"""Reads what a pass made, before it is forgotten."""


def forward(
    model: Any, inputs: dict[str, Any], *, take: Take | None = None, **options: Any
) -> Scope:
    """One watched forward pass of the layers alone: nobody reads the logits."""
    base = sites.find(model).base
    if _takes_use_cache(base):
        inputs = {**inputs, "use_cache": False}
    with ExitStack() as undo:
        undo.enter_context(torch.no_grad())
        scope = undo.enter_context(watch(model, **options))
        if take is None:
            base(**inputs)
        else:
            held = undo.enter_context(record(model, options["layers"]))
            base(**inputs)
            take(held)
    return scope


def _takes_use_cache(base: Any) -> bool:
    return "use_cache" in inspect.signature(base.forward).parameters


class Pass:
    """A forward pass under one choice of queries, read for the stored heads alone."""

    def __init__(
        self,
        experiment: Experiment,
        plan: ModelPlan,
        model: Any,
        text: Text,
        queries: str,
        take: Take | None,
    ):
        chosen = text.queries(queries)
        self.counted = chosen is not None
        """Whether any query counted; if not, every number is nan."""
        inputs = {name: value.to(model.device) for name, value in text.inputs.items()}
        options = {
            "layers": None if plan.layers is None else list(plan.layers),
            "backend": experiment.backend,
            "seed": experiment.seed,
        }

        def run(classes: Any = None) -> Scope:
            nonlocal take
            watched = chosen if chosen is not None else "all"
            once, take = take, None
            return forward(model, inputs, take=once, queries=watched, classes=classes, **options)

        self.flows: dict[str, Array] = {}
        scope = None
        kept: list[Any] = []
        if "flow" in experiment.measures:
            for label, classes in experiment.class_sets.items():
                ids = classes.ids(text.batch.input_ids, plan.tokenizer, text.real)
                scope = run(ids)
                kept = [self._kept(scope, plan, layer) for layer in scope.layers]
                # A class that no token of the batch has is missing at the end of the table.
                found = self._stack(scope.flow, scope, kept)
                short = len(classes) - found.shape[-1]
                found = np.pad(found, ((0, 0), (0, 0), (0, short), (0, short)))
                empty = ~(ids[..., None] == np.arange(len(classes))).any(axis=1)
                found[np.broadcast_to(empty[:, None, :, None], found.shape)] = np.nan
                self.flows[label] = found
        self.scope = scope if scope is not None else run()
        kept = kept or [self._kept(self.scope, plan, layer) for layer in self.scope.layers]
        self.picked = kept
        self.heads: list[tuple[int, int]] = [
            (layer, int(head))
            for layer, heads in zip(self.scope.layers, kept, strict=True)
            for head in heads
        ]
        """[S] layer and head."""
        self.layer_of = np.repeat(np.arange(len(kept)), [len(heads) for heads in kept])
        """[S] which of the measured layers."""
        self.received = self.stack(self.scope.received)
        self._average: Array | None = None

    @staticmethod
    def _kept(scope: Scope, plan: ModelPlan, layer: int) -> list[int]:
        there = scope.entropy(layer).shape[1]
        if plan.heads is None:
            return list(range(there))
        beyond = [head for head in plan.heads if head >= there]
        if beyond:
            raise InputError(
                f"model {plan.label!r} has no head {beyond[0]} in layer {layer}: "
                f"it has heads 0 to {there - 1}"
            )
        return list(plan.heads)

    def stack(self, read: Callable[[int], Any]) -> Array:
        """A statistic [B, H, …] of every layer, as [B, S, …]."""
        return self._stack(read, self.scope, self.picked)

    def _stack(self, read: Callable[[int], Any], scope: Scope, kept: list[list[int]]) -> Array:
        parts = []
        for layer, heads in zip(scope.layers, kept, strict=True):
            part = read(layer)
            parts.append((part if len(heads) == part.shape[1] else part[:, heads]).cpu())
        stacked: Array = torch.cat(parts, dim=1).double().numpy()
        return stacked if self.counted else np.full_like(stacked, np.nan)

    @property
    def average(self) -> Array:
        """[B, S, K]"""
        if self._average is None:
            self._average = self.stack(self.scope.average)
        return self._average

    def uniform(self) -> tuple[Array, Array]:
        """[B, L, K] what even attention would give, by measured layer; [B] number of queries."""
        even = [self.scope.uniform(layer).cpu() for layer in self.scope.layers]
        count = self.scope.count(self.scope.layers[0]).cpu().double().numpy()
        count = np.where(count > 0, count, np.nan) if self.counted else np.full_like(count, np.nan)
        return torch.stack(even, dim=1).double().numpy(), count
