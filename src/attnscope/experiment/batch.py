"""Measures one batch with one model: every number that the experiment names.

The base goes first; its sums and outputs are held while the variants are compared with them. What
is measured, of what, and under which of the experiment's choices is what each measure declares.

Shapes: B prompts, K tokens of the longest, S stored heads (of all layers, one after the other).
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attnscope.capture.stored_rows import binned, bins_of
from attnscope.experiment.cells import Batch, Cell
from attnscope.experiment.condition_batch import ConditionBatch
from attnscope.experiment.intervene import intervene
from attnscope.experiment.model_pass import PassResult, forward_pass, generation_pass
from attnscope.experiment.plan import ModelPlan
from attnscope.experiment.results import Column, HeadValues, Measured, Profile, QueryValues
from attnscope.measures.layer import Array, Layer, stack_layers
from attnscope.measures.measure import Measure, Numbers
from attnscope.measures.registry import MEASURES
from attnscope.spec.experiment import Experiment
from attnscope.tokens import PaddedBatch, pad


def measure_batch(
    experiment: Experiment, plan: ModelPlan, model: Any, batch: Batch
) -> dict[str, Measured]:
    """Every condition of a batch, the base first: one forward pass each, or one answer."""
    measures = [measure for measure in MEASURES.values() if measure.name in experiment.measures]
    base: PassResult | None = None
    measured = {}
    for condition, cells in batch.cells.items():
        chosen = [
            measure for measure in measures if not measure.compares_to_base or base is not None
        ]
        with _run(experiment, plan, model, cells, measures, base) as passed:
            measured[condition] = _measure(experiment, plan, chosen, passed)
            if experiment.generate is not None:
                measured[condition].cells = passed.padded.cells
            if condition == experiment.base:
                base = passed.held()
    return measured


@contextmanager
def _run(
    experiment: Experiment,
    plan: ModelPlan,
    model: Any,
    cells: tuple[Cell, ...],
    measures: list[Measure],
    base: PassResult | None,
) -> Iterator[PassResult]:
    """One condition: its texts read, or its prompts answered."""
    what = experiment.conditions[cells[0].condition]
    padded = ConditionBatch(experiment, plan, cells)

    def changed(batch: PaddedBatch) -> AbstractContextManager[None]:
        return intervene(what, model, plan.tokenizer, batch, experiment.classes.values())

    if experiment.generate is not None:
        generation = generation_pass(experiment, plan, model, cells, measures, base)
        with changed(pad(padded.batch.rows, plan.tokenizer, side="left")), generation as passed:
            if passed.sums:
                yield passed
                return
        padded = passed.padded  # nothing was fed back: the prompts were all that the model read
    with (
        changed(padded.batch),
        forward_pass(experiment, plan, model, padded, measures, base) as passed,
    ):
        yield passed


Layers = list[tuple[int, list[int], Layer]]


def _measure(
    experiment: Experiment, plan: ModelPlan, chosen: list[Measure], passed: PassResult
) -> Measured:
    readings: list[HeadValues] = []
    profiles: dict[str, Profile] = {}
    series: list[QueryValues] = []
    for queries in experiment.queries:
        layers = list(passed.layers(queries))
        joined = stack_layers([layer for _, _, layer in layers])
        stored = HeadValues(
            queries, [(layer, head) for layer, heads, _ in layers for head in heads]
        )
        for measure in chosen:
            if measure.level == "token":
                profiles[queries] = _profile(measure, plan, layers)
            elif measure.level == "query":
                series += _series(measure, experiment, plan, queries, layers, passed)
            elif measure.needs <= {"sums", "flow"} and not measure.compares_to_base:
                _add(stored, measure, experiment, joined, passed)
            elif "sums" in measure.needs:
                _add(stored, measure, experiment, [layer for _, _, layer in layers], passed)
            elif queries == experiment.queries[0]:  # every choice of queries makes the same
                heads = _heads_of_layers(measure, layers)
                alone = HeadValues("all", heads)
                _add(alone, measure, experiment, [layer for _, _, layer in layers], passed)
                readings.append(alone)
        if stored.columns:
            readings.append(stored)
    return Measured(readings, profiles, series)


def _heads_of_layers(measure: Measure, layers: Layers) -> list[tuple[int, int | None]]:
    """Layers and heads of a measure that has others than the stored query heads."""
    if measure.level == "layer":
        return [(layer, None) for layer, _, _ in layers]
    return [
        (layer, head)
        for layer, _, data in layers
        for head in range(data.recorded["values"].shape[1])
    ]


def _add(
    reading: HeadValues,
    measure: Measure,
    experiment: Experiment,
    layers: Sequence[Layer],
    passed: PassResult,
) -> None:
    """The numbers of a measure, under each of the experiment's choices that it goes over."""
    for columns, view in _views(measure, experiment, passed):
        parts_found = [
            _arrays(measure.numbers(_viewed(layer, view)), len(columns)) for layer in layers
        ]
        parts = zip(*parts_found, strict=True)
        reading.add(columns, tuple(np.concatenate(part, axis=1) for part in parts))


def _views(
    measure: Measure, experiment: Experiment, passed: PassResult
) -> Iterator[tuple[list[Column], dict[str, Any]]]:
    """Each of the experiment's choices that a measure goes over: its columns, and what a layer has
    to see."""
    by_class = measure.per & {"classes", "class pairs"}
    for keys in experiment.keys if "keys" in measure.per else ("all",):
        for label in experiment.classes if by_class else (None,):
            view: dict[str, Any] = {"keys": passed.padded.keys(keys)}
            if label is not None:
                view["shares"] = torch.from_numpy(passed.padded.shares(keys, label))
            if label in passed.tables:
                view["groups"] = torch.from_numpy(passed.tables[label])
            yield _columns(measure, experiment, keys, label), view


def _series(
    measure: Measure,
    experiment: Experiment,
    plan: ModelPlan,
    queries: str,
    layers: Layers,
    passed: PassResult,
) -> list[QueryValues]:
    """The numbers of each query, as means over bins of positions."""
    parts_found = []
    for columns, view in _views(measure, experiment, passed):
        heads: list[tuple[int, int]] = []
        parts = []
        for layer, stored, data in layers:
            kept = [n for n, head in enumerate(stored) if plan.keeps(layer, head)]
            if not kept:
                continue
            heads += [(layer, stored[n]) for n in kept]
            value = torch.as_tensor(measure.numbers(_viewed(data, view)).value)[:, kept]
            counted = data.sums.count > 0  # otherwise no query is selected
            where = data.per_query.positions.where(counted[:, None], -1)
            value = value.flatten(3) if value.ndim > 3 else value[..., None]
            parts.append(binned(value, where, experiment.bin).cpu())
        if not heads:
            continue
        first = bins_of(where, experiment.bin).cpu()
        count = torch.zeros_like(first)
        counts = (where >= 0).cpu()
        count.scatter_add_(1, where.cpu().clamp(min=0) // experiment.bin, counts.long())
        parts_found.append(
            QueryValues(
                queries, heads, columns, first.numpy(), count.numpy(), torch.cat(parts, 1).numpy()
            )
        )
    return parts_found


def _viewed(layer: Layer, view: dict[str, Any]) -> Layer:
    """A layer under a choice; tensors go where the layer is."""
    device = layer.sums.received.device
    moved: dict[str, Any] = {
        name: part.to(device) if isinstance(part, torch.Tensor) else part
        for name, part in view.items()
    }
    return replace(layer, **moved)


def _columns(
    measure: Measure, experiment: Experiment, keys: str, label: str | None
) -> list[Column]:
    items: list[tuple[str | None, str | None]] = [(item, None) for item in measure.items or (None,)]
    if label is not None:
        names = experiment.classes[label].names
        items = [(c, None) for c in names]
        if "class pairs" in measure.per:
            items = [(c, d) for c in names for d in names]
        if "steps" in measure.per and experiment.generate is not None:
            steps = range(1, experiment.generate.max_new_tokens + 1)
            items = [(c, str(step)) for c in names for step in steps]
    return [Column(keys, label, name, *item) for item in items for name in measure.columns]


def _arrays(numbers: Numbers, width: int) -> tuple[Array, Array, Array, Array]:
    """Value, uniform, tokens and error, float64 [B, heads, columns] each; nan for what is not."""
    value = _array(numbers.value)
    shape = (*value.shape[:2], width)
    value = value.reshape(shape)

    def beside(value: Any) -> Array:
        if value is None:
            return np.full(shape, np.nan)
        array = _array(value)
        return np.broadcast_to(array[..., None] if array.ndim == 2 else array, shape)

    return value, beside(numbers.uniform), beside(numbers.tokens), beside(numbers.error)


def _array(value: Any) -> Array:
    array = value.cpu().numpy() if isinstance(value, torch.Tensor) else value
    return np.asarray(array, dtype=np.float64)


def _profile(measure: Measure, plan: ModelPlan, layers: Layers) -> Profile:
    heads: list[tuple[int, int]] = []
    parts = []
    for layer, stored, data in layers:
        kept = [n for n, head in enumerate(stored) if plan.keeps(layer, head)]
        heads += [(layer, stored[n]) for n in kept]
        of_kept = replace(data, sums=data.sums.select_heads(kept))
        parts.append(torch.as_tensor(measure.numbers(of_kept).value).cpu())
    parts_found = torch.cat(parts, dim=1).float().numpy()
    return Profile(
        heads, {name: parts_found[..., n].copy() for n, name in enumerate(measure.columns)}
    )
