"""What a plan will take, roughly: for `run --check`.

Time comes from a stand-in timed on the spot: some layers of the model's shape, with weights of its
own, which measures some of the plan's batches as the run will, for about a second. Memory comes
from the shape alone. They say whether to wait or to go for lunch, nothing finer.

This module must not know how anything is stored.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from attnscope.experiment.cells import Batch
from attnscope.experiment.plan import ModelPlan, Plan
from attnscope.loading import load_config
from attnscope.spec.experiment import Experiment

# The stand-in: tokens it knows, and parameters of the layers that it has, one at least: of a small
# model it has all, and what is done once a batch is counted once.
WORDS, PARAMETERS = 1000, 12_000_000
# Seconds to spend on timing it.
SPENT = 1.0


@dataclass(frozen=True)
class Estimate:
    """What one model will take, roughly."""

    label: str
    name: str
    cells: int
    batches: int
    passes: int
    """Forward passes: batches × conditions."""
    tokens: int
    """Of all cells."""
    longest: int
    """Tokens of the longest cell."""
    parameters: int
    seconds: float
    bytes: int
    """Weights, and one batch on its way through the model."""


def estimate(plan: Plan) -> list[Estimate]:
    """Time and memory for each model, with nothing loaded."""
    return [_estimate(plan, model) for model in plan.models]


def _estimate(plan: Plan, model: ModelPlan) -> Estimate:
    experiment = plan.experiment
    config = load_config(model.info.pinned)
    text = config.get_text_config()
    parameters, of_layers = _parameters(config)
    hidden = int(getattr(text, "hidden_size", 0) or 0)
    layers, heads = model.info.layers or 0, model.info.heads or 0
    measured = layers if model.layers is None else len(model.layers)
    lengths = [cells for batch in model.batches for cells in batch.lengths()]
    largest = max(len(cells) * max(cells) for cells in lengths)
    rows = largest * heads * measured
    speed = _speed(plan, model, config, of_layers / max(1, layers))
    seconds = 0.0
    for batch in model.batches:
        plain, watched = speed(batch)
        seconds += layers * plain + measured * max(0.0, watched - plain)
    passes = len(model.batches) * len(experiment.conditions)
    width_of = 4 if _full(experiment, plan.device) else 2
    working = largest * (hidden * 12 + int(getattr(text, "intermediate_size", 0) or 0) * 2)
    return Estimate(
        label=model.label,
        name=model.info.name,
        cells=sum(map(len, lengths)),
        batches=len(model.batches),
        passes=passes,
        tokens=sum(map(sum, lengths)),
        longest=max(map(max, lengths)),
        parameters=parameters,
        seconds=seconds,
        bytes=int(
            parameters * width_of + working * width_of + len(experiment.queries) * rows * 8 * 3
        ),
    )


def _full(experiment: Experiment, device: str) -> bool:
    return experiment.dtype == "float32" or (experiment.dtype == "auto" and device == "cpu")


def _parameters(config: Any) -> tuple[int, int]:
    """All, and those of the layers alone: embeddings are looked up, and nobody asks for logits.
    Counted on a model without memory.
    """
    import torch

    from attnscope.loading import model_class

    with torch.device("meta"):
        empty = model_class(config)._from_config(config)
    whole = sum(parameter.numel() for parameter in empty.parameters())
    ends = {empty.get_input_embeddings(), empty.get_output_embeddings()} - {None}
    beside = {id(one): one.numel() for end in ends for one in end.parameters()}
    return whole, whole - sum(beside.values())


Speed = Callable[[Batch], tuple[float, float]]
"""Of a batch under all its conditions: seconds of a layer, plain and measured."""


def _padded(batch: Batch) -> int:
    """Tokens of a batch under all its conditions, padding included."""
    return sum(len(cells) * max(cells) for cells in batch.lengths())


def _speed(plan: Plan, of_model: ModelPlan, config: Any, of_a_layer: float) -> Speed:
    """Time a stand-in on the median, the smallest and the largest batch, as far as time allows."""
    import numpy as np

    model, layers = _stand_in(plan, config, of_a_layer)
    of_model = replace(of_model, layers=None, profile_layers=None)
    ordered = sorted(of_model.batches, key=_padded)
    least = replace(ordered[0], numbers=ordered[0].numbers[:1], rows=ordered[0].rows[:1])
    _seconds(plan.experiment, of_model, model, least)  # what is done once for a process
    timed: dict[int, tuple[float, float]] = {}
    begin = time.perf_counter()
    for batch in (ordered[len(ordered) // 2], ordered[0], ordered[-1]):
        size = _padded(batch) // len(batch.rows[0])
        if size in timed or (timed and time.perf_counter() - begin > SPENT):
            continue
        part = _part(batch, conditions=2)
        found = _seconds(plan.experiment, of_model, model, part)
        timed[size] = found[0] / layers / _padded(part), found[1] / layers / _padded(part)
    known = sorted(timed)

    def speed(batch: Batch) -> tuple[float, float]:
        tokens = _padded(batch)
        size = tokens / len(batch.rows[0])
        plain, watched = (
            float(np.interp(size, known, [timed[n][which] for n in known])) for which in (0, 1)
        )
        return plain * tokens, watched * tokens

    return speed


def _part(batch: Batch, conditions: int) -> Batch:
    """A batch under its first conditions alone."""
    some = [dict(islice(row.items(), conditions)) for row in batch.rows]
    return replace(batch, rows=tuple(some))


def _seconds(
    experiment: Experiment, of_model: ModelPlan, model: Any, batch: Batch
) -> tuple[float, float]:
    """Of a batch, its passes alone and all that is measured: the better of two, or the one that
    took long enough to believe it. Where the model answers there is no telling them apart."""
    from attnscope.experiment.batch import measure_batch
    from attnscope.experiment.condition_batch import ConditionBatch
    from attnscope.experiment.forward import forward

    def plainly() -> None:
        for cells in batch.cells.values():
            inputs = ConditionBatch(experiment, of_model, cells).inputs
            with forward(model, {name: x.to(model.device) for name, x in inputs.items()}, {}):
                pass

    def measured() -> None:
        measure_batch(experiment, of_model, model, batch)

    watched = _best(measured, model.device)
    return watched if experiment.generate is not None else _best(plainly, model.device), watched


def _best(do: Callable[[], None], device: Any) -> float:
    import torch

    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        do()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        best = min(best, took)
        if took > SPENT / 4:
            break
    return best


def _stand_in(plan: Plan, config: Any, of_a_layer: float) -> tuple[Any, int]:
    """A model of this shape with few layers and words, and how many layers."""
    import torch

    from attnscope.loading import model_class

    small = copy.deepcopy(config)
    text = small.get_text_config()
    layers = min(max(1, round(PARAMETERS / max(1.0, of_a_layer))), text.num_hidden_layers)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    text.vocab_size = WORDS
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    where = plan.device if plan.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.float32 if _full(plan.experiment, where) else torch.bfloat16
    model = model_class(small)._from_config(small)
    model = model.to(device=where, dtype=kind).eval()
    model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: (ids[0] % WORDS,))
    return model, layers
