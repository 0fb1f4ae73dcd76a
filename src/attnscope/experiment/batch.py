"""One batch through one model: every number the experiment asks for.

The base goes first; its sums and outputs are held while the variants are compared with them. What
is measured, of what, and under which of the experiment's choices is what each measure declares.

Shapes: B prompts, K tokens of the longest, S stored heads (of all layers, one after the other).

This module must not know files or tables, or any single measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from attnscope.capture.activations import Activations
from attnscope.capture.record import Limits
from attnscope.capture.scope import Scope
from attnscope.capture.tally import Tally
from attnscope.errors import InputError
from attnscope.experiment.answer import answering, with_answer, with_room
from attnscope.experiment.cells import Batch, Cell
from attnscope.experiment.forward import forward, thresholds
from attnscope.experiment.intervene import intervening
from attnscope.experiment.measured import Array, Column, Measured, Profile, Reading, joined
from attnscope.experiment.padded import Padded
from attnscope.experiment.plan import ModelPlan
from attnscope.measures.layer import Layer, Pair, Single, Sums
from attnscope.measures.measure import Measure, Need, Numbers
from attnscope.measures.registry import MEASURES
from attnscope.question.spec import Experiment

Made = dict[int, dict[str, Any]]
"""What each layer made, by the name that measures call it."""


def measure_batch(
    experiment: Experiment, plan: ModelPlan, model: Any, batch: Batch
) -> dict[str, Measured]:
    """Every condition of a batch, the base first: one forward pass each. Where the model answers,
    prompt by prompt."""
    if experiment.generate is None:
        return _conditions(experiment, plan, model, batch.cells)
    alone = [
        _conditions(
            experiment,
            plan,
            model,
            {name: (cell,) for name, cell in zip(batch.cells, row, strict=True)},
        )
        for row in zip(*batch.cells.values(), strict=True)
    ]
    return {name: joined([measured[name] for measured in alone]) for name in batch.cells}


def _conditions(
    experiment: Experiment, plan: ModelPlan, model: Any, conditions: dict[str, tuple[Cell, ...]]
) -> dict[str, Measured]:
    wanted = [measure for measure in MEASURES.values() if measure.name in experiment.measures]
    base: _Pass | None = None
    measured = {}
    for condition, cells in conditions.items():
        asked = [measure for measure in wanted if not measure.pair or base is not None]
        padded = Padded(experiment, plan, cells)
        if experiment.generate is None:
            passing = _passed(experiment, plan, model, padded, wanted, base)
        else:
            passing = _answered(experiment, plan, model, cells[0], wanted, base)
        with intervening(experiment.conditions[condition], model, padded), passing as passed:
            measured[condition] = _measure(experiment, plan, asked, passed)
            if experiment.generate is not None:
                measured[condition].cells = passed.padded.cells
            if condition == experiment.base:
                base = passed.held()
    return measured


@contextmanager
def _passed(
    experiment: Experiment,
    plan: ModelPlan,
    model: Any,
    padded: Padded,
    wanted: list[Measure],
    base: _Pass | None,
) -> Iterator[_Pass]:
    """The forward pass of a condition; what layers made is there inside the `with` alone."""
    needs = {need for measure in wanted for need in measure.needs}
    choices = {name: padded.queries(name) for name in experiment.queries}
    groups, tables = padded.groups() if "flow" in needs else (None, {})
    inputs = {name: value.to(model.device) for name, value in padded.inputs.items()}
    layers = None if plan.layers is None else list(plan.layers)
    limits = None
    if "activations" in needs:
        limits = thresholds(model, inputs, layers) if base is None else base.limits
    with forward(
        model,
        inputs,
        # Where no token is meant, there is no number; the pass shows its shape.
        {name: "all" if chosen is None else chosen for name, chosen in choices.items()},
        layers=layers,
        backend=experiment.backend,
        seed=_seed(experiment, padded),
        classes=groups,
        keep="rows" in needs,
        activations=bool(needs & _POINTS),
        limits=limits,
    ) as (scopes, held, tallies):
        yield _Pass(
            padded=padded,
            sums={name: _stored(scopes[name], plan, choices[name]) for name in choices},
            single={
                name: _single(scopes[name], plan, choices[name])
                for name in (choices if "rows" in needs else ())
            },
            made=_made(held, needs & _POINTS, tallies),
            tables=tables,
            base=base,
            limits=limits,
        )


@contextmanager
def _answered(
    experiment: Experiment,
    plan: ModelPlan,
    model: Any,
    cell: Cell,
    wanted: list[Measure],
    base: _Pass | None,
) -> Iterator[_Pass]:
    """The same of a model that answers: its prompt and every token that it was fed."""
    assert experiment.generate is not None
    needs = {need for measure in wanted for need in measure.needs}
    longest = Padded(experiment, plan, (with_room(cell, experiment.generate),))
    choices = {name: longest.queries(name) for name in experiment.queries}
    with answering(
        model,
        cell,
        {name: "all" if chosen is None else chosen for name, chosen in choices.items()},
        experiment.generate,
        layers=None if plan.layers is None else list(plan.layers),
        backend=experiment.backend,
        keep="rows" in needs,
    ) as (scopes, new):
        padded = Padded(experiment, plan, (with_answer(cell, new, plan.tokenizer),))
        if len(new) > 1:
            sums = {name: _stored(scopes[name], plan, choices[name]) for name in choices}
            single = {
                name: _single(scopes[name], plan, choices[name])
                for name in (choices if "rows" in needs else ())
            }
            yield _Pass(padded=padded, sums=sums, single=single, made={}, tables={}, base=base)
    if len(new) == 1:  # nothing was fed back: the prompt was all that the model read
        with _passed(experiment, plan, model, padded, wanted, base) as passed:
            yield passed


def _seed(experiment: Experiment, padded: Padded) -> int:
    """Of the queries that are sampled: one for each batch, the same under every condition. One for
    all would draw the same places of every prompt, and what that misses would not average out.
    """
    drawn = np.random.SeedSequence([experiment.seed % 2**64, padded.cells[0].prompt])
    return int(drawn.generate_state(1)[0])  # 32 bits: torch's generators look at no more


_POINTS: set[Need] = {"values", "heads", "outputs"}


def _made(held: Activations | None, points: set[Need], tallies: dict[int, Tally]) -> Made:
    made: Made = {}
    if held is not None:
        read = {"values": held.values, "heads": held.heads, "outputs": held.outputs}
        made = {layer: {point: read[point](layer) for point in points} for layer in held.layers}
    for layer, tally in tallies.items():
        B = len(tally.sketch.counts)
        made.setdefault(layer, {})["activations"] = tally.tokens.view(B, -1, tally.tokens.shape[1])
    return made


def _stored(scope: Scope, plan: ModelPlan, chosen: Any) -> dict[int, tuple[list[int], Sums]]:
    """By layer: the heads that are stored, and their sums."""
    found = {}
    for layer in scope.layers:
        sums = scope.sums(layer)
        there = sums.received.shape[1]
        heads = list(range(there)) if plan.heads is None else list(plan.heads)
        if beyond := [head for head in heads if head >= there]:
            raise InputError(
                f"model {plan.label!r} has no head {beyond[0]} in layer {layer}: "
                f"it has heads 0 to {there - 1}"
            )
        sums = sums.of_heads(heads)
        found[layer] = heads, sums if chosen is not None else sums.of_nobody()
    return found


def _single(scope: Scope, plan: ModelPlan, chosen: Any) -> dict[int, Single]:
    """By layer: what single queries look at; nan where no token is meant."""
    found = {layer: scope.single(layer, plan.heads) for layer in scope.layers}
    if chosen is not None:
        return found

    def nothing(single: Single, name: str, *asked: Any) -> Any:
        told = single.read(name, *asked)
        return told * np.nan if isinstance(told, torch.Tensor) else [t * np.nan for t in told]

    return {
        layer: replace(single, read=partial(nothing, single)) for layer, single in found.items()
    }


@dataclass(eq=False, kw_only=True)
class _Pass:
    """What one condition showed, and the base it is compared with."""

    padded: Padded
    sums: dict[str, dict[int, tuple[list[int], Sums]]]
    """By queries and layer."""
    single: dict[str, dict[int, Single]]
    """The same, where a measure needs it; there while the pass is."""
    made: Made
    tables: dict[str, Array]
    """By class set: of which class each group of queries is."""
    base: _Pass | None
    limits: Limits | None = None
    """What near zero and large mean for each prompt: in the base, and in its variants too."""

    def held(self) -> _Pass:
        """What variants are compared with, and no more: not what is only read within a prompt."""
        sums = {
            queries: {
                layer: (heads, replace(of, flow=None)) for layer, (heads, of) in found.items()
            }
            for queries, found in self.sums.items()
        }
        made = {
            layer: {name: what.float().cpu() for name, what in of.items() if name != "values"}
            for layer, of in self.made.items()
        }
        return replace(self, sums=sums, single={}, made=made)

    def layers(self, queries: str) -> Iterator[tuple[int, list[int], Layer]]:
        """Number, stored heads, and all there is to see."""
        for layer, (heads, sums) in self.sums[queries].items():
            pair = None
            if self.base is not None:
                pair = Pair(
                    base=self.base.sums[queries][layer][1],
                    twin=self.padded.twin,
                    inserted=self.padded.inserted,
                    made=self.base.made.get(layer, {}),
                )
            yield (
                layer,
                heads,
                Layer(
                    sums=sums,
                    made=self.made.get(layer, {}),
                    pair=pair,
                    rows=self.single.get(queries, {}).get(layer),
                    tokens=self.padded.tokens,
                    following=self.padded.following,
                    begins=self.padded.begins,
                    steps=self.padded.steps,
                ),
            )


Layers = list[tuple[int, list[int], Layer]]


def _measure(
    experiment: Experiment, plan: ModelPlan, asked: list[Measure], passed: _Pass
) -> Measured:
    readings: list[Reading] = []
    profiles: dict[str, Profile] = {}
    for queries in experiment.queries:
        layers = list(passed.layers(queries))
        stored = Reading(queries, [(layer, head) for layer, heads, _ in layers for head in heads])
        for measure in asked:
            if measure.level == "token":
                profiles[queries] = _profile(measure, plan, layers)
            elif "sums" in measure.needs:
                _add(stored, measure, experiment, layers, passed)
            elif queries == experiment.queries[0]:  # every choice of queries makes the same
                heads = _heads_of_layers(measure, layers)
                alone = Reading("all", heads)
                _add(alone, measure, experiment, layers, passed)
                readings.append(alone)
        if stored.columns:
            readings.append(stored)
    return Measured(readings, profiles)


def _heads_of_layers(measure: Measure, layers: Layers) -> list[tuple[int, int | None]]:
    """Layers and heads of a measure that has others than the stored query heads."""
    if measure.level == "layer":
        return [(layer, None) for layer, _, _ in layers]
    return [
        (layer, head) for layer, _, seen in layers for head in range(seen.made["values"].shape[1])
    ]


def _add(
    reading: Reading, measure: Measure, experiment: Experiment, layers: Layers, passed: _Pass
) -> None:
    """The numbers of a measure, under each of the experiment's choices that it goes over."""
    by_class = measure.over & {"classes", "class pairs"}
    for keys in experiment.keys if "keys" in measure.over else ("all",):
        for label in experiment.classes if by_class else (None,):
            columns = _columns(measure, experiment, keys, label)
            view: dict[str, Any] = {"keys": passed.padded.keys(keys)}
            if label is not None:
                view["shares"] = torch.from_numpy(passed.padded.shares(keys, label))
            if label in passed.tables:
                view["groups"] = torch.from_numpy(passed.tables[label])
            found = [
                _arrays(measure.numbers(_viewed(layer, view)), len(columns))
                for _, _, layer in layers
            ]
            reading.add(
                columns, *(np.concatenate(part, axis=1) for part in zip(*found, strict=True))
            )


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
        if "class pairs" in measure.over:
            items = [(c, d) for c in names for d in names]
        if "steps" in measure.over and experiment.generate is not None:
            steps = range(1, experiment.generate.max_new_tokens + 1)
            items = [(c, str(step)) for c in names for step in steps]
    return [Column(keys, label, name, *item) for item in items for name in measure.columns]


def _arrays(numbers: Numbers, width: int) -> tuple[Array, Array, Array, Array]:
    """Value, uniform, tokens and error, float64 [B, heads, columns] each; nan for what is not."""
    value = _array(numbers.value)
    shape = (*value.shape[:2], width)
    value = value.reshape(shape)

    def beside(given: Any) -> Array:
        if given is None:
            return np.full(shape, np.nan)
        array = _array(given)
        return np.broadcast_to(array[..., None] if array.ndim == 2 else array, shape)

    return value, beside(numbers.uniform), beside(numbers.tokens), beside(numbers.error)


def _array(given: Any) -> Array:
    array = given.cpu().numpy() if isinstance(given, torch.Tensor) else given
    return np.asarray(array, dtype=np.float64)


def _profile(measure: Measure, plan: ModelPlan, layers: Layers) -> Profile:
    heads: list[tuple[int, int]] = []
    parts = []
    for layer, stored, seen in layers:
        kept = [n for n, head in enumerate(stored) if plan.keeps(layer, head)]
        heads += [(layer, stored[n]) for n in kept]
        of_kept = replace(seen, sums=seen.sums.of_heads(kept))
        parts.append(torch.as_tensor(measure.numbers(of_kept).value).cpu())
    found = torch.cat(parts, dim=1).float().numpy()
    return Profile(heads, {name: found[..., n].copy() for n, name in enumerate(measure.columns)})
