"""Step 2 of a batch: one condition through a model, by a forward pass or by generation.

The forward pass runs the layers alone, without logits and without a KV cache. Prompts to complete
are padded on the left, so that a prompt has the same numbers as alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch

from attnscope.activations.layer_activations import Activations, capture_activations
from attnscope.activations.record import Limits, limits_of, summing_tokens
from attnscope.activations.residual_peaks import residual_peaks
from attnscope.activations.token_sums import TokenSums
from attnscope.errors import InputError
from attnscope.experiment.completion import complete
from attnscope.experiment.condition_batch import ConditionBatch
from attnscope.experiment.intervene import intervene
from attnscope.experiment.next_token import next_token
from attnscope.experiment.plan import ModelPlan
from attnscope.experiment.sound import has_sound, sound_of, speech_inputs, speech_parts
from attnscope.experiment.unpad import pad_left, unpad_rows, unpad_sums
from attnscope.interception import sites
from attnscope.measures.activations import EDGES
from attnscope.measures.layer import Array, Baseline, Layer, PerQuery, Sound, Sums
from attnscope.measures.measure import Need
from attnscope.scope.scope import Scope
from attnscope.scope.watch import watch
from attnscope.tokens import PaddedBatch, pad

Recorded = dict[int, dict[str, Any]]
"""What each layer made, by the name that measures call it."""
_POINTS: set[Need] = {"values", "heads", "outputs"}


@dataclass(eq=False, kw_only=True)
class PassResult:
    """What one condition showed, and the base it is compared with."""

    batch: ConditionBatch
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
    sound: dict[str, dict[int, Sound]] = field(default_factory=dict)
    """By queries and layer: what a speech model heard."""

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
        return replace(self, sums=sums, single={}, sound={}, recorded=recorded)

    def layers(self, queries: str) -> Iterator[tuple[int, list[int], Layer]]:
        """Number, stored heads, and all there is to see."""
        for layer, (heads, sums) in self.sums[queries].items():
            pair = None
            if self.base is not None:
                pair = Baseline(
                    sums=self.base.sums[queries][layer][1],
                    aligned_position=self.batch.aligned_position,
                    inserted=self.batch.inserted,
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
                    tokens=self.batch.tokens,
                    generated=self.batch.completions,
                    sound=self.sound.get(queries, {}).get(layer),
                    targets=self.batch.targets,
                    sentences=self.batch.sentences,
                ),
            )


@contextmanager
def run_pass(
    model: Any, batch: ConditionBatch, needs: set[Need], base: PassResult | None
) -> Iterator[PassResult]:
    """One condition: its texts are read, or its prompts are completed. What layers made is there
    inside the `with` alone."""
    experiment, tokenizer = batch.experiment, batch.plan.tokenizer

    def intervened(padded: PaddedBatch) -> AbstractContextManager[None]:
        condition = experiment.conditions[batch.cells[0].condition]
        return intervene(condition, model, tokenizer, padded, experiment.classes.values())

    if experiment.generate is not None:
        left = pad(batch.padded.rows, tokenizer, side="left")
        with intervened(left), _generation(model, batch, left, needs, base) as result:
            if result.sums:
                yield result
                return
        batch = result.batch  # nothing was fed back: the model read the prompts alone
    with intervened(batch.padded), _forward_pass(model, batch, needs, base) as result:
        yield result


@contextmanager
def _forward_pass(
    model: Any, batch: ConditionBatch, needs: set[Need], base: PassResult | None
) -> Iterator[PassResult]:
    choices = {name: batch.queries(name) for name in batch.experiment.queries}
    groups, tables = batch.groups() if "flow" in needs else (None, {})
    inputs = speech_inputs(batch, model) if has_sound(batch) else on_device(model, batch.inputs)
    layers = _layers(batch.plan)
    limits = None
    if "activations" in needs:
        limits = thresholds(model, inputs, layers) if base is None else base.limits
    # Prompts are padded on the right.
    last = torch.from_numpy(batch.real.sum(1) - 1) if "next_token" in needs else None
    with (
        residual_peaks(model, layers) if "residual" in needs else nullcontext({}) as peaks,
        forward(
            model,
            inputs,
            _all_for_none(choices),
            layers=layers,
            backend=batch.experiment.backend,
            seed=_seed(batch),
            classes=groups,
            keep=bool(needs & {"rows", "sound"}),
            max_logit="max_logit" in needs,
            activations=bool(needs & _POINTS),
            limits=limits,
            last=last,
        ) as (scopes, held, tallies, after),
    ):
        rows = choices if "rows" in needs else ()
        recorded = _recorded(held, needs & _POINTS, tallies, limits or {}, peaks)
        if after is not None:
            first = min(scopes[batch.experiment.queries[0]].layers)
            recorded.setdefault(first, {})["next_token"] = after
        yield PassResult(
            batch=batch,
            sums={name: stored_sums(scopes[name], batch.plan, choices[name]) for name in choices},
            single={name: single_queries(scopes[name], batch.plan, choices[name]) for name in rows},
            recorded=recorded,
            tables=tables,
            base=base,
            limits=limits,
            sound=_heard(scopes, batch, choices) if "sound" in needs else {},
        )


@contextmanager
def _generation(
    model: Any,
    batch: ConditionBatch,
    padded: PaddedBatch,
    needs: set[Need],
    base: PassResult | None,
) -> Iterator[PassResult]:
    """The prompts, padded on the left, and every token that was fed back; no sums if none was."""
    plan = batch.plan
    longest = batch.with_longest_completions()
    choices = {name: longest.queries(name) for name in batch.experiment.queries}
    left = torch.from_numpy((~padded.real).sum(1))
    width = padded.input_ids.shape[1] + batch.max_new_tokens - 1
    options: dict[str, Any] = {
        "layers": _layers(plan),
        "backend": batch.experiment.backend,
        "keep": "rows" in needs,
        "max_logit": "max_logit" in needs,
    }
    with ExitStack() as undo:
        scopes: dict[str, Scope] = {}
        for name, queries in _all_for_none(choices).items():
            chosen = queries if isinstance(queries, str) else pad_left(queries, left, width, False)
            watching = watch(model, queries=chosen, **options)
            scopes[name] = undo.enter_context(watching)
        completions = _completions(model, batch, padded)
        batch = batch.with_completions(completions)
        result = PassResult(batch=batch, sums={}, single={}, recorded={}, tables={}, base=base)
        for name in choices if max(map(len, completions)) > 1 else ():
            stored = stored_sums(scopes[name], plan, choices[name])
            result.sums[name] = {
                layer: (heads, unpad_sums(sums, left, batch.real.shape[1]))
                for layer, (heads, sums) in stored.items()
            }
            if "rows" in needs:
                result.single[name] = {
                    layer: unpad_rows(single, left, stored[layer][1].received.shape[-1])
                    for layer, single in single_queries(scopes[name], plan, choices[name]).items()
                }
        yield result


def _completions(model: Any, batch: ConditionBatch, padded: PaddedBatch) -> list[list[int]]:
    """The generated tokens of every prompt, up to its end token."""
    assert batch.experiment.generate is not None
    numbers = [cell.prompt for cell in batch.cells]
    tokenizer = batch.plan.tokenizer
    inputs = on_device(model, batch.inputs_of(padded))
    completions = complete(
        model, tokenizer, padded, batch.experiment.generate, numbers, inputs=inputs
    )
    for number, completion in zip(numbers, completions, strict=True):
        if not completion:
            raise InputError(
                f"prompt {number}: the model generated no token; give another prompt or "
                "leave out 'generate'",
                code="empty-completion",
                prompt=number,
            )
    return completions


def _layers(plan: ModelPlan) -> list[int] | None:
    return None if plan.layers is None else list(plan.layers)


def _all_for_none(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Queries for `watch`. A choice without any query in this batch is watched with all of them,
    for the shapes; its numbers are removed afterwards."""
    return {name: "all" if chosen is None else chosen for name, chosen in choices.items()}


@contextmanager
def forward(
    model: Any,
    inputs: dict[str, Any],
    choices: Mapping[str, Any],
    *,
    layers: list[int] | None = None,
    activations: bool = False,
    limits: Limits | None = None,
    last: torch.Tensor | None = None,
    **options: Any,
) -> Iterator[
    tuple[dict[str, Scope], Activations | None, dict[int, TokenSums], torch.Tensor | None]
]:
    """One scope for each of the choices of queries; the activations, which are held inside the
    `with` alone; where there are limits to count them by, what MLPs made; and, if `last` is given,
    the log-probabilities of the token after these positions, int64 [B]."""
    base, base_inputs = _layers_alone(model, inputs)
    if "input_features" in inputs:
        _, model = speech_parts(model)  # the part that has queries
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
        after = None
        if last is None:
            base(**base_inputs)
        else:
            after = next_token(model, inputs, last.to(model.device))
        yield scopes, held, tallies, after


@torch.no_grad()
def thresholds(model: Any, inputs: dict[str, Any], layers: list[int] | None) -> Limits:
    """What near zero and large mean for these sequences: a pass of its own, since what an
    activation is compared with is not known before all of them are."""
    base, inputs = _layers_alone(model, inputs)
    with summing_tokens(model, layers) as tallies:
        base(**inputs)
    return limits_of(tallies)


def on_device(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of inputs on the model's device; pixels in its dtype."""
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in inputs.items()
    }


_base_models: WeakKeyDictionary[Any, dict[bool, tuple[ref[Any], bool]]] = WeakKeyDictionary()
"""The layers of each model, for text and for text with pictures, and whether they take the argument
`use_cache`. All are the same for every batch, and finding them takes milliseconds."""


def _layers_alone(model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if "input_features" in inputs:
        return speech_parts(model)[0], {**inputs, "use_cache": False}
    pictures = bool(set(inputs) - {"input_ids", "attention_mask"})
    known = _base_models.setdefault(model, {})
    if pictures not in known:
        model_sites = sites.find(model)
        base = model_sites.base_model
        if pictures:  # the innermost model that reads them
            base = [model, *sites.outer_models_of(model_sites).get(base, ())][-1]
        takes_cache = "use_cache" in inspect.signature(base.forward).parameters
        known[pictures] = ref(base), takes_cache
    base_model, takes_cache = known[pictures]
    return base_model(), {**inputs, "use_cache": False} if takes_cache else inputs


def _seed(batch: ConditionBatch) -> int:
    """Seed for `sample:K`, per batch and shared by all conditions. A single seed would sample the
    same positions in every prompt and bias the mean."""
    drawn = np.random.SeedSequence([batch.experiment.seed % 2**64, batch.cells[0].prompt])
    return int(drawn.generate_state(1)[0])  # torch's generators use 32 bits


def _recorded(
    held: Activations | None,
    points: set[Need],
    tallies: dict[int, TokenSums],
    limits: Limits,
    peaks: dict[int, torch.Tensor],
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
    for layer, fields in peaks.items():
        recorded.setdefault(layer, {})["residual"] = fields
    return recorded


def stored_sums(scope: Scope, plan: ModelPlan, chosen: Any) -> dict[int, tuple[list[int], Sums]]:
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


def single_queries(scope: Scope, plan: ModelPlan, chosen: Any) -> dict[int, PerQuery]:
    """By layer: the attention rows of each query; nan where no token is selected."""
    return {
        layer: replace(scope.single(layer, plan.heads), empty=chosen is None)
        for layer in scope.layers
    }


def _heard(
    scopes: Mapping[str, Scope], batch: ConditionBatch, choices: Mapping[str, Any]
) -> dict[str, dict[int, Sound]]:
    """By queries and layer: the cross-attention of each query, with the words in time."""
    heard: dict[str, dict[int, Sound]] = {}
    for name, chosen in choices.items():
        cross = scopes[name]["cross"]
        heard[name] = {
            layer: sound_of(batch, rows, cross.sums(layer).received.shape[-1])
            for layer, rows in single_queries(cross, batch.plan, chosen).items()
        }
    return heard
