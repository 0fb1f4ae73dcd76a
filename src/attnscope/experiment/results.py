"""Step 3 of a batch: from the sums of its passes to numbers, in columns per stored head.

The base goes first; its sums and outputs are held while the variants are compared with them. What
is measured, of what, and under which of the experiment's choices is what each measure declares. A
column names the keys, classes, measure and item of its numbers; it is the same for every prompt of
a batch, so that tables can be built without looking at single numbers.

Shapes: B prompts, K tokens of the longest, S stored heads (of all layers, one after the other),
C columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from attnscope.experiment.cells import Batch, Cell
from attnscope.experiment.condition_batch import ConditionBatch
from attnscope.experiment.model_pass import PassResult, run_pass
from attnscope.experiment.plan import ModelPlan
from attnscope.experiment.vllm_pass import run_vllm
from attnscope.measures.layer import Array, Layer, stack_layers
from attnscope.measures.measure import Measure, Numbers
from attnscope.measures.registry import MEASURES
from attnscope.scope.stored_rows import binned, bins_of
from attnscope.spec.experiment import Experiment

Layers = list[tuple[int, list[int], Layer]]
"""Number of a layer, its stored heads, and all there is to measure."""


class Column(NamedTuple):
    """What a number is, beside its layer and head."""

    keys: str
    classes: str | None
    measure: str
    item: str | None
    target: str | None


@dataclass(eq=False)
class HeadValues:
    """The numbers of one condition under one choice of queries."""

    queries: str
    heads: list[tuple[int | None, int | None]]
    """[S] layer and head; None where a number is of the whole layer or text."""
    columns: list[Column] = field(default_factory=list)
    numbers: list[tuple[Array, ...]] = field(default_factory=list)
    """Value, uniform, tokens and error, [B, S, C] in parts; nan where there is no number."""

    def add(self, columns: list[Column], numbers: tuple[Array, ...]) -> None:
        """Columns and their numbers."""
        self.columns += columns
        self.numbers.append(numbers)


class Profile(NamedTuple):
    """A number for each token of some heads."""

    heads: list[tuple[int, int]]
    """[S] layer and head."""
    columns: dict[str, NDArray[np.float32]]
    """By name [B, S, K]."""


class QueryValues(NamedTuple):
    """Numbers for each query of some heads, or for bins of queries."""

    queries: str
    heads: list[tuple[int, int]]
    """[S] layer and head."""
    columns: list[Column]
    positions: NDArray[np.int64]
    """[B, N] the first position of each bin, -1 where no query counts."""
    counts: NDArray[np.int64]
    """[B, N] how many do."""
    value: NDArray[np.float32]
    """[B, S, N, C]"""


@dataclass(eq=False)
class Measured:
    """The numbers of one condition of a batch."""

    readings: list[HeadValues]
    profiles: dict[str, Profile]
    """By queries; empty if not asked for."""
    series: list[QueryValues] = field(default_factory=list)
    """Of measures at level `query`."""
    cells: tuple[Cell, ...] = ()
    """As they were measured, where that is more than was planned: with the model's answers."""


def measure_batch(
    experiment: Experiment, plan: ModelPlan, model: Any, batch: Batch
) -> dict[str, Measured]:
    """Every condition of a batch, the base first: one forward pass each, or one generation."""
    measures = [measure for measure in MEASURES.values() if measure.name in experiment.measures]
    needs = {need for measure in measures for need in measure.needs}
    base: PassResult | None = None
    pass_of = run_vllm if experiment.engine == "vllm" else run_pass
    measured = {}
    for condition, cells in batch.cells.items():
        chosen = [one for one in measures if not one.compares_to_base or base is not None]
        of_condition = ConditionBatch(experiment, plan, cells)
        with pass_of(model, of_condition, needs, base) as passed:
            measured[condition] = _measure(chosen, passed)
            if experiment.generate is not None:
                measured[condition].cells = passed.batch.cells
            if condition == experiment.base:
                base = passed.held()
    return measured


def _measure(chosen: list[Measure], passed: PassResult) -> Measured:
    experiment, plan = passed.batch.experiment, passed.batch.plan
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
                series += _series(measure, queries, layers, passed)
            elif measure.needs <= {"sums", "flow"} and not measure.compares_to_base:
                _add(stored, measure, joined, passed)
            elif "sums" in measure.needs:
                _add(stored, measure, [layer for _, _, layer in layers], passed)
            elif measure.level == "text":
                if queries == experiment.queries[0]:
                    alone = HeadValues("all", [(None, None)])
                    _add(alone, measure, [layers[0][2]], passed)
                    readings.append(alone)
            elif queries == experiment.queries[0]:  # every choice of queries makes the same
                heads = _heads_of_layers(measure, layers)
                alone = HeadValues("all", heads)
                _add(alone, measure, [layer for _, _, layer in layers], passed)
                readings.append(alone)
        if stored.columns:
            readings.append(stored)
    return Measured(readings, profiles, series)


def _heads_of_layers(measure: Measure, layers: Layers) -> list[tuple[int | None, int | None]]:
    """Layers and heads of a measure that has others than the stored query heads."""
    if measure.level == "layer":
        return [(layer, None) for layer, _, _ in layers]
    return [
        (layer, head)
        for layer, _, data in layers
        for head in range(data.recorded["values"].shape[1])
    ]


def _add(
    reading: HeadValues, measure: Measure, layers: Sequence[Layer], passed: PassResult
) -> None:
    """The numbers of a measure, under each of the experiment's choices that it goes over."""
    for columns, view in _views(measure, passed):
        parts_found = [
            _arrays(measure.numbers(_viewed(layer, view)), len(columns)) for layer in layers
        ]
        parts = zip(*parts_found, strict=True)
        reading.add(columns, tuple(np.concatenate(part, axis=1) for part in parts))


def _views(measure: Measure, passed: PassResult) -> Iterator[tuple[list[Column], dict[str, Any]]]:
    """Each of the experiment's choices that a measure goes over: its columns, and what a layer has
    to see."""
    experiment = passed.batch.experiment
    by_class = measure.per & {"classes", "class pairs"}
    for keys in experiment.keys if "keys" in measure.per else ("all",):
        for label in experiment.classes if by_class else (None,):
            view: dict[str, Any] = {"keys": passed.batch.keys(keys)}
            if label is not None:
                view["shares"] = torch.from_numpy(passed.batch.shares(keys, label))
            if label in passed.tables:
                view["groups"] = torch.from_numpy(passed.tables[label])
            yield _columns(measure, experiment, keys, label), view


def _series(
    measure: Measure, queries: str, layers: Layers, passed: PassResult
) -> list[QueryValues]:
    """The numbers of each query, as means over bins of positions."""
    plan, size = passed.batch.plan, passed.batch.experiment.bin
    parts_found = []
    for columns, view in _views(measure, passed):
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
            parts.append(binned(value, where, size).cpu())
        if not heads:
            continue
        first = bins_of(where, size).cpu()
        count = torch.zeros_like(first)
        counts = (where >= 0).cpu()
        count.scatter_add_(1, where.cpu().clamp(min=0) // size, counts.long())
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
