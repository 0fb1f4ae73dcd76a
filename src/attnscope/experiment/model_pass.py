"""One condition of a batch through a model: the sums of its forward pass or of its generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from attnscope.capture.layer_activations import Activations
from attnscope.capture.record import Limits
from attnscope.capture.scope import Scope
from attnscope.capture.token_sums import TokenSums
from attnscope.errors import InputError
from attnscope.experiment.cells import Cell
from attnscope.experiment.completion import generating, with_completion, with_longest_completion
from attnscope.experiment.condition_batch import ConditionBatch
from attnscope.experiment.forward import forward, thresholds
from attnscope.experiment.plan import ModelPlan
from attnscope.experiment.unpad import unpad_rows, unpad_sums
from attnscope.measures.activation_shape import EDGES
from attnscope.measures.layer import Array, Baseline, Layer, PerQuery, Sums
from attnscope.measures.measure import Measure, Need
from attnscope.spec.experiment import Experiment

Recorded = dict[int, dict[str, Any]]
"""What each layer made, by the name that measures call it."""
_POINTS: set[Need] = {"values", "heads", "outputs"}


@dataclass(eq=False, kw_only=True)
class PassResult:
    """What one condition showed, and the base it is compared with."""

    padded: ConditionBatch
    sums: dict[str, dict[int, tuple[list[int], Sums]]]
    """By queries and layer."""
    single: dict[str, dict[int, PerQuery]]
    """The same, where a measure needs it; there while the pass is."""
    recorded: Recorded
    tables: dict[str, Array]
    """By class set: of which class each group of queries is."""
    base: PassResult | None
    limits: Limits | None = None
    """What near zero and large mean for each prompt: in the base, and in its variants too."""

    def held(self) -> PassResult:
        """What variants are compared with, and no more: not what is only read within a prompt."""
        sums = {
            queries: {
                layer: (heads, replace(of, flow=None)) for layer, (heads, of) in result.items()
            }
            for queries, result in self.sums.items()
        }
        recorded = {
            layer: {name: what.float().cpu() for name, what in of.items() if name != "values"}
            for layer, of in self.recorded.items()
        }
        return replace(self, sums=sums, single={}, recorded=recorded)

    def layers(self, queries: str) -> Iterator[tuple[int, list[int], Layer]]:
        """Number, stored heads, and all there is to see."""
        for layer, (heads, sums) in self.sums[queries].items():
            pair = None
            if self.base is not None:
                pair = Baseline(
                    sums=self.base.sums[queries][layer][1],
                    aligned_position=self.padded.aligned_position,
                    inserted=self.padded.inserted,
                    recorded=self.base.recorded.get(layer, {}),
                )
            yield (
                layer,
                heads,
                Layer(
                    sums=sums,
                    recorded=self.recorded.get(layer, {}),
                    base=pair,
                    rows=self.single.get(queries, {}).get(layer),
                    tokens=self.padded.tokens,
                    next_token=self.padded.following,
                    completion_start=self.padded.begins,
                    max_new_tokens=self.padded.steps,
                ),
            )


@contextmanager
def forward_pass(
    experiment: Experiment,
    plan: ModelPlan,
    model: Any,
    padded: ConditionBatch,
    measures: list[Measure],
    base: PassResult | None,
) -> Iterator[PassResult]:
    """The forward pass of a condition; what layers made is there inside the `with` alone."""
    needs = {need for measure in measures for need in measure.needs}
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
        yield PassResult(
            padded=padded,
            sums={name: _stored(scopes[name], plan, choices[name]) for name in choices},
            single={
                name: _single(scopes[name], plan, choices[name])
                for name in (choices if "rows" in needs else ())
            },
            recorded=_recorded(held, needs & _POINTS, tallies, limits or {}),
            tables=tables,
            base=base,
            limits=limits,
        )


@contextmanager
def generation_pass(
    experiment: Experiment,
    plan: ModelPlan,
    model: Any,
    cells: tuple[Cell, ...],
    measures: list[Measure],
    base: PassResult | None,
) -> Iterator[PassResult]:
    """The same of a model that answers: the prompts and every token that it was fed; without sums
    where none was."""
    assert experiment.generate is not None
    generate = experiment.generate
    needs = {need for measure in measures for need in measure.needs}
    longest = ConditionBatch(
        experiment, plan, tuple(with_longest_completion(cell, generate) for cell in cells)
    )
    choices = {name: longest.queries(name) for name in experiment.queries}
    with generating(
        model,
        plan.tokenizer,
        cells,
        {name: "all" if chosen is None else chosen for name, chosen in choices.items()},
        generate,
        layers=None if plan.layers is None else list(plan.layers),
        backend=experiment.backend,
        keep="rows" in needs,
    ) as (scopes, completions, left):
        each = zip(cells, completions, strict=True)
        padded = ConditionBatch(
            experiment, plan, tuple(with_completion(*one, plan.tokenizer) for one in each)
        )
        result = PassResult(padded=padded, sums={}, single={}, recorded={}, tables={}, base=base)
        for name in choices if max(map(len, completions)) > 1 else ():
            stored = _stored(scopes[name], plan, choices[name])
            result.sums[name] = {
                layer: (heads, unpad_sums(sums, left, padded.real.shape[1]))
                for layer, (heads, sums) in stored.items()
            }
            if "rows" in needs:
                result.single[name] = {
                    layer: unpad_rows(single, left, stored[layer][1].received.shape[-1])
                    for layer, single in _single(scopes[name], plan, choices[name]).items()
                }
        yield result


def _seed(experiment: Experiment, padded: ConditionBatch) -> int:
    """Seed for `sample:K`, per batch and shared by all conditions. A single seed would sample the
    same positions in every prompt and bias the mean."""
    drawn = np.random.SeedSequence([experiment.seed % 2**64, padded.cells[0].prompt])
    return int(drawn.generate_state(1)[0])  # torch's generators use 32 bits


def _recorded(
    held: Activations | None, points: set[Need], tallies: dict[int, TokenSums], limits: Limits
) -> Recorded:
    recorded: Recorded = {}
    if held is not None:
        read = {"values": held.values, "heads": held.heads, "outputs": held.outputs}
        recorded = {layer: {point: read[point](layer) for point in points} for layer in held.layers}
    for layer, tally in tallies.items():
        B = len(tally.histogram.counts)
        here = recorded.setdefault(layer, {})
        here["activations"] = tally.tokens.view(B, -1, tally.tokens.shape[1])
        edges = limits[layer][1].cpu()[:, None] * torch.tensor(EDGES, dtype=torch.float64)
        bins = tally.histogram.histogram(edges)
        here["histogram"] = torch.cat([bins, tally.histogram.gini()[:, None]], 1)
    return recorded


def _stored(scope: Scope, plan: ModelPlan, chosen: Any) -> dict[int, tuple[list[int], Sums]]:
    """By layer: the heads that are stored, and their sums."""
    result = {}
    for layer in scope.layers:
        sums = scope.sums(layer)
        count = sums.received.shape[1]
        heads = list(range(count)) if plan.heads is None else list(plan.heads)
        if beyond := [head for head in heads if head >= count]:
            raise InputError(
                f"model {plan.label!r} has no head {beyond[0]} in layer {layer}: it has heads 0 "
                f"to {count - 1}",
                code="unknown-head",
                value=beyond[0],
                model=plan.label,
                layer=layer,
                count=count,
            )
        sums = sums.select_heads(heads)
        result[layer] = heads, sums if chosen is not None else sums.empty_copy()
    return result


def _single(scope: Scope, plan: ModelPlan, chosen: Any) -> dict[int, PerQuery]:
    """By layer: the attention rows of each query; nan where no token is selected."""
    result = {layer: scope.single(layer, plan.heads) for layer in scope.layers}
    if chosen is not None:
        return result

    def all_nan(single: PerQuery, name: str, *arguments: Any) -> Any:
        value = single.read(name, *arguments)
        return value * np.nan if isinstance(value, torch.Tensor) else [t * np.nan for t in value]

    return {
        layer: replace(single, read=partial(all_nan, single)) for layer, single in result.items()
    }
