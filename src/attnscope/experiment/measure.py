"""One batch through one model: every number the experiment asks for.

The base goes first; its averages and outputs are held while the variants are compared with them.
A measure is a function here that adds its columns, in one of the literal dicts or lists.

This module must not know files or tables.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from attnscope.capture.activations import Activations
from attnscope.experiment.passes import Pass, Take
from attnscope.experiment.plan import Batch, ModelPlan
from attnscope.experiment.readings import Array, Column, Measured, Reading
from attnscope.experiment.texts import Text
from attnscope.measures import pairs
from attnscope.measures.affine import affine_fit
from attnscope.measures.values import value_similarity
from attnscope.question.spec import HEAD_MEASURES, Experiment

__all__ = ["measure_batch"]


def measure_batch(
    experiment: Experiment, plan: ModelPlan, model: Any, batch: Batch
) -> dict[str, Measured]:
    """Every condition of a batch, the base first."""
    averages: dict[str, Array] = {}
    outputs: dict[int, Any] = {}
    made = [name for name in _PAIRS_OF_ACTIVATIONS if name in experiment.measures]
    measured = {}
    for condition, cells in batch.cells.items():
        text = Text(experiment, plan, cells)
        readings: list[Reading] = []
        profiles = {}
        for queries in experiment.queries:
            take: Take | None = None
            if made and queries == experiment.queries[0]:  # every choice of queries makes the same
                if condition == experiment.base:
                    take = partial(_keep_outputs, outputs)
                else:
                    take = partial(_compare_activations, made, text, outputs, readings)
            seen = Pass(experiment, plan, model, text, queries, take)
            reading = Reading(queries, list(seen.heads))
            for read in _READERS:
                read(experiment, text, seen, reading)
            if condition == experiment.base:
                if experiment.variants and _needs_averages(experiment):
                    averages[queries] = seen.average
            else:
                for measure, compare in _PAIRS.items():
                    if measure in experiment.measures:
                        compare(experiment, text, seen, averages[queries], reading)
            if reading.columns:
                readings.append(reading)
            if "profile" in experiment.measures:
                kept = [n for n, (layer, head) in enumerate(seen.heads) if plan.keeps(layer, head)]
                profiles[queries] = (
                    [seen.heads[n] for n in kept],
                    seen.average[:, kept].astype(np.float32),
                    seen.received[:, kept].astype(np.float32),
                )
        measured[condition] = Measured(readings, profiles)
    return measured


def _needs_averages(experiment: Experiment) -> bool:
    return any(measure in _PAIRS for measure in experiment.measures)


# What is read of every condition; each adds its columns where the experiment asks for them.


def _mass(experiment: Experiment, text: Text, seen: Pass, reading: Reading) -> None:
    if text.shares is None:
        return
    even, count = seen.uniform()
    per_query = count[:, None, None]
    reading.add(
        text.columns,
        seen.received @ text.shares / per_query,
        (even @ text.shares / per_query)[:, seen.layer_of],
        np.nan_to_num(text.shares).sum(axis=1)[:, None],
    )


def _flow(experiment: Experiment, text: Text, seen: Pass, reading: Reading) -> None:
    for label, table in seen.flows.items():
        names = experiment.class_sets[label].names
        columns = [Column("all", label, "flow", c, d) for c in names for d in names]
        reading.add(columns, table.reshape(*table.shape[:2], -1))


def _per_head(experiment: Experiment, text: Text, seen: Pass, reading: Reading) -> None:
    asked = [measure for measure in HEAD_MEASURES if measure in experiment.measures]
    if asked:
        columns = [Column("all", None, measure, None, None) for measure in asked]
        values = [seen.stack(getattr(seen.scope, measure)) for measure in asked]
        reading.add(columns, np.stack(values, axis=2))


_READERS = (_mass, _flow, _per_head)


# What compares a variant with its base; `base` is the base's `average`.


def _lambda(experiment: Experiment, text: Text, seen: Pass, base: Array, reading: Reading) -> None:
    old = pairs.on_variant(base, text.twin())
    for keys, (mask, _) in text.keys.items():
        slope, ratio, fit, size = pairs.slope(old, seen.average, mask[:, None])
        spikes, rest, of_spikes, of_rest = pairs.spike_and_rest(old, seen.average, mask[:, None])
        names = ("lambda", "lambda_ratio", "lambda_r2", "spike_ratio", "rest_ratio")
        reading.add(
            [Column(keys, None, name, None, None) for name in names],
            np.stack([slope, ratio, fit, spikes, rest], axis=2),
            tokens=np.stack([size, size, size, of_spikes, of_rest], axis=2),
        )


def _uniformity(
    experiment: Experiment, text: Text, seen: Pass, base: Array, reading: Reading
) -> None:
    value, size = pairs.uniformity(seen.average, text.filler()[:, None])
    column = Column("all", None, "uniformity", None, None)
    reading.add([column], value[..., None], tokens=size[..., None])


_PAIRS: dict[str, Callable[[Experiment, Text, Pass, Array, Reading], None]] = {
    "lambda": _lambda,
    "uniformity": _uniformity,
}


# What compares the activations of a variant with those of its base, read while they are held.


def _keep_outputs(outputs: dict[int, Any], held: Activations) -> None:
    outputs.update({layer: held.outputs(layer).float().cpu() for layer in held.layers})


def _compare_activations(
    made: list[str],
    text: Text,
    outputs: dict[int, Any],
    readings: list[Reading],
    held: Activations,
) -> None:
    readings += [_PAIRS_OF_ACTIVATIONS[measure](text, outputs, held) for measure in made]


def _value_similarity(text: Text, outputs: dict[int, Any], held: Activations) -> Reading:
    """The heads are key/value heads, all of them: which are stored is about query heads."""
    span = torch.from_numpy(text.filler())
    found = {layer: value_similarity(held.values(layer), span).cpu() for layer in held.layers}
    heads = [(layer, head) for layer in held.layers for head in range(found[layer].shape[1])]
    value = torch.cat([found[layer] for layer in held.layers], dim=1).numpy()[..., None]
    reading = Reading("all", list(heads))
    size = text.filler().sum(axis=1).astype(np.float64)[:, None, None]
    reading.add([Column("all", None, "value_similarity", None, None)], value, tokens=size)
    return reading


def _affine(text: Text, outputs: dict[int, Any], held: Activations) -> Reading:
    value = np.empty((len(text.cells), len(held.layers), 3))
    size = np.empty((len(text.cells), 1, 1))
    for place, layer in enumerate(held.layers):
        new = held.outputs(layer).float().cpu()
        for row, cell in enumerate(text.cells):
            twins = cell.alignment
            assert twins is not None
            fit = affine_fit(outputs[layer][row, twins.base], new[row, twins.variant])
            value[row, place] = fit.slope, fit.sigma, fit.r2
            size[row] = fit.tokens
    reading = Reading("all", [(layer, None) for layer in held.layers])
    names = ("affine_lambda", "affine_sigma", "affine_r2")
    reading.add([Column("all", None, name, None, None) for name in names], value, tokens=size)
    return reading


_PAIRS_OF_ACTIVATIONS: dict[str, Callable[[Text, dict[int, Any], Activations], Reading]] = {
    "value_similarity": _value_similarity,
    "affine": _affine,
}
