"""One batch through one model: every number the experiment asks for, as arrays.

A condition's numbers are columns per stored head (`Column`: which keys, classes, measure, item),
the same for every prompt of the batch, so that the tables can be built without looking at single
numbers. The base goes first; its averages are held while the variants are compared with them.

Shapes: B prompts, K tokens of the longest, S stored heads (of all layers, one after the other),
C columns.

This module must not know files or tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from attnscope.capture import sites
from attnscope.capture.attention import watch
from attnscope.capture.scope import Scope
from attnscope.errors import InputError
from attnscope.experiment.plan import Batch, Cell, ModelPlan
from attnscope.experiment.spec import HEAD_MEASURES, Experiment
from attnscope.measures import pairs
from attnscope.tokens import TokenizedPrompt, pad

__all__ = ["Column", "Measured", "Reading", "forward", "measure_batch"]

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Column(NamedTuple):
    """What a number is, beside its layer and head."""

    keys: str
    classes: str | None
    measure: str
    item: str | None
    target: str | None


@dataclass(eq=False)
class Reading:
    """The numbers of one condition under one choice of queries."""

    queries: str
    heads: list[tuple[int, int | None]]
    """[S] layer and head; None where a number is of the whole layer."""
    columns: list[Column] = field(default_factory=list)
    value: list[Array] = field(default_factory=list)
    """[B, S, C] in parts, as are the two below; nan where there is no number."""
    uniform: list[Array] = field(default_factory=list)
    tokens: list[Array] = field(default_factory=list)

    def add(
        self, columns: list[Column], value: Array, uniform: Any = np.nan, tokens: Any = np.nan
    ) -> None:
        """Columns and their numbers [B, S, C]; what is not given is nan."""
        self.columns += columns
        self.value.append(value)
        self.uniform.append(np.broadcast_to(uniform, value.shape))
        self.tokens.append(np.broadcast_to(tokens, value.shape))


@dataclass(eq=False)
class Measured:
    """The numbers of one condition of a batch."""

    readings: list[Reading]
    profiles: dict[str, tuple[list[tuple[int, int]], NDArray[np.float32], NDArray[np.float32]]]
    """By queries: layers and heads [S], average and received [B, S, K]; empty if not asked for."""


def forward(model: Any, inputs: dict[str, Any], **options: Any) -> Scope:
    """One watched forward pass of the layers alone: nobody reads the logits."""
    base = sites.find(model).base
    if _takes_use_cache(base):
        inputs = {**inputs, "use_cache": False}
    with torch.no_grad(), watch(model, **options) as scope:
        base(**inputs)
    return scope


def _takes_use_cache(base: Any) -> bool:
    code = type(base).forward
    code = getattr(code, "__wrapped__", code)
    return "use_cache" in code.__code__.co_varnames[: code.__code__.co_argcount]


def measure_batch(
    experiment: Experiment, plan: ModelPlan, model: Any, batch: Batch
) -> dict[str, Measured]:
    """Every condition of a batch, the base first."""
    averages: dict[str, Array] = {}
    measured = {}
    for condition, cells in batch.cells.items():
        text = _Text(experiment, plan, cells)
        readings: list[Reading] = []
        profiles = {}
        for queries in experiment.queries:
            seen = _Pass(experiment, plan, model, text, queries)
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
                profiles[queries] = (
                    seen.heads,
                    seen.average.astype(np.float32),
                    seen.received.astype(np.float32),
                )
        measured[condition] = Measured(readings, profiles)
    return measured


def _needs_averages(experiment: Experiment) -> bool:
    return any(measure in _PAIRS for measure in experiment.measures)


class _Text:
    """The cells of one condition as a rectangle, and what its tokens are. Padded on the right."""

    def __init__(self, experiment: Experiment, plan: ModelPlan, cells: tuple[Cell, ...]):
        self.cells = cells
        self.batch = pad([cell.tokens for cell in cells], plan.tokenizer, side="right")
        self.real: Mask = self.batch.attention_mask.astype(bool)
        self.tokenizer = plan.tokenizer
        self.keys = {name: self._keys(name) for name in experiment.keys}
        self.columns: list[Column] = []
        shares = []
        if "mass" in experiment.measures:
            for keys, (mask, there) in self.keys.items():
                inside = np.where(there[:, None], mask, np.nan)
                for label, classes in experiment.class_sets.items():
                    table = classes.weights(self.batch.input_ids, plan.tokenizer, self.real)
                    shares.append(table * inside[..., None])
                    self.columns += [Column(keys, label, "mass", c, None) for c in classes.names]
        self.shares = np.concatenate(shares, axis=2, dtype=np.float64) if shares else None
        """[B, K, C] the share of each token in each column of `mass`; nan without the region."""

    def region(self, name: str) -> Mask:
        """[B, K] the tokens of a region; none where the prompt has no such region."""
        inside = np.zeros_like(self.real)
        for row, cell in enumerate(self.cells):
            inside[row, : len(cell.tokens)] = _region(cell.tokens, name)
        return inside

    def _keys(self, name: str) -> tuple[Mask, Mask]:
        """[B, K] which tokens are meant, and [B] whether the prompt has such tokens."""
        mask = self.real.copy()
        if name == "not-first":
            mask[:, 0] = False
        elif name != "all":
            mask = self.region(name)
        return mask, _any(mask)

    def queries(self, name: str) -> Any:
        """What `watch` takes; None where no token of the batch is meant."""
        kind, _, region = name.partition(":")
        if kind in ("all", "last", "sample"):
            return name
        mask = self.region(region)
        if kind == "after":
            last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
            behind = np.arange(mask.shape[1]) > last[:, None]
            mask = behind & self.real & _any(mask)[:, None]
        return torch.from_numpy(mask) if mask.any() else None

    @property
    def inputs(self) -> dict[str, Any]:
        """What the model takes. Without padding there is no mask to work around."""
        given = dict(self.batch.inputs)
        if self.real.all():
            del given["attention_mask"]
        return given

    def twin(self) -> NDArray[np.int64]:
        """[B, K] the base token that each token was; -1 for none."""
        twin = np.full(self.real.shape, -1, dtype=np.int64)
        for row, cell in enumerate(self.cells):
            assert cell.alignment is not None
            twin[row, cell.alignment.variant] = cell.alignment.base
        return twin

    def filler(self) -> Mask:
        """[B, K] the inserted tokens."""
        inside = np.zeros_like(self.real)
        for row, cell in enumerate(self.cells):
            assert cell.alignment is not None
            inside[row, cell.alignment.filler] = True
        return inside


def _any(mask: Mask) -> Mask:
    """[B] whether a row has any."""
    return np.asarray(mask.any(axis=1))


def _region(tokens: TokenizedPrompt, name: str) -> Mask:
    if name not in tokens.prompt.names:
        return np.zeros(len(tokens), dtype=bool)
    return tokens.mask(name)


class _Pass:
    """A forward pass under one choice of queries, read for the stored heads alone."""

    def __init__(
        self, experiment: Experiment, plan: ModelPlan, model: Any, text: _Text, queries: str
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
            watched = chosen if chosen is not None else "all"
            return forward(model, inputs, queries=watched, classes=classes, **options)

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


# What is read of every condition; each adds its columns where the experiment asks for them.


def _mass(experiment: Experiment, text: _Text, seen: _Pass, reading: Reading) -> None:
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


def _flow(experiment: Experiment, text: _Text, seen: _Pass, reading: Reading) -> None:
    for label, table in seen.flows.items():
        names = experiment.class_sets[label].names
        columns = [Column("all", label, "flow", c, d) for c in names for d in names]
        reading.add(columns, table.reshape(*table.shape[:2], -1))


def _per_head(experiment: Experiment, text: _Text, seen: _Pass, reading: Reading) -> None:
    asked = [measure for measure in HEAD_MEASURES if measure in experiment.measures]
    if asked:
        columns = [Column("all", None, measure, None, None) for measure in asked]
        values = [seen.stack(getattr(seen.scope, measure)) for measure in asked]
        reading.add(columns, np.stack(values, axis=2))


_READERS = (_mass, _flow, _per_head)


# What compares a variant with its base; `base` is the base's `average`.


def _lambda(
    experiment: Experiment, text: _Text, seen: _Pass, base: Array, reading: Reading
) -> None:
    old = pairs.on_variant(base, text.twin())
    for keys, (mask, _) in text.keys.items():
        slope, ratio, size = pairs.slope(old, seen.average, mask[:, None])
        spikes, rest, of_spikes, of_rest = pairs.spike_and_rest(old, seen.average, mask[:, None])
        names = ("lambda", "lambda_ratio", "spike_ratio", "rest_ratio")
        reading.add(
            [Column(keys, None, name, None, None) for name in names],
            np.stack([slope, ratio, spikes, rest], axis=2),
            tokens=np.stack([size, size, of_spikes, of_rest], axis=2),
        )


def _uniformity(
    experiment: Experiment, text: _Text, seen: _Pass, base: Array, reading: Reading
) -> None:
    value, size = pairs.uniformity(seen.average, text.filler()[:, None])
    column = Column("all", None, "uniformity", None, None)
    reading.add([column], value[..., None], tokens=size[..., None])


_PAIRS: dict[str, Callable[[Experiment, _Text, _Pass, Array, Reading], None]] = {
    "lambda": _lambda,
    "uniformity": _uniformity,
}
