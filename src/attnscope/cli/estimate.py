"""Estimate the time and memory of a plan, for `run --check`.

The time comes from a small test model with random weights and some layers of the same shape. It
measures some batches of the plan for about a second. The memory comes from the shape of the model.
Both are rough.
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

# The test model: its vocabulary, and the parameters of its layers. It has at least one layer, and
# all layers of a small model, so that the cost per batch is counted once.
WORDS, PARAMETERS = 1000, 12_000_000
# Seconds to spend on timing the test model.
SPENT = 1.0


@dataclass(frozen=True)
class Estimate:
    """The estimated time and memory of one model."""

    label: str
    name: str
    cells: int
    batches: int
    passes: int
    """Forward passes: batches × conditions."""
    tokens: int
    """Tokens of all cells."""
    longest: int
    """Tokens of the longest cell."""
    parameters: int
    seconds: float
    bytes: int
    """Memory of the weights and of one batch in the forward pass."""


def estimate(plan: Plan) -> list[Estimate]:
    """Estimate time and memory of each model, without loading it."""
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
    """The number of all parameters, and of those in layers, counted on the meta device.

    Embeddings take no time in a forward pass, and a run computes no logits.
    """
    import torch

    from attnscope.loading import model_class

    with torch.device("meta"):
        empty = model_class(config)._from_config(config)
    total = sum(parameter.numel() for parameter in empty.parameters())
    ends = {empty.get_input_embeddings(), empty.get_output_embeddings()} - {None}
    beside = {id(one): one.numel() for end in ends for one in end.parameters()}
    return total, total - sum(beside.values())


Speed = Callable[[Batch], tuple[float, float]]
"""Batch with all conditions → seconds per layer, without and with measuring."""


def _padded(batch: Batch) -> int:
    """Tokens of a batch with all conditions, padding included."""
    return sum(len(cells) * max(cells) for cells in batch.lengths())


def _speed(plan: Plan, of_model: ModelPlan, config: Any, of_a_layer: float) -> Speed:
    """Time a test model on the median, smallest and largest batch, within `SPENT` seconds."""
    import numpy as np

    model, layers = _test_model(plan, config, of_a_layer)
    of_model = replace(of_model, layers=None, profile_layers=None)
    ordered = sorted(of_model.batches, key=_padded)
    least = replace(ordered[0], numbers=ordered[0].numbers[:1], rows=ordered[0].rows[:1])
    _seconds(plan.experiment, of_model, model, least)  # warm up the process
    timed: dict[int, tuple[float, float]] = {}
    begin = time.perf_counter()
    for batch in (ordered[len(ordered) // 2], ordered[0], ordered[-1]):
        size = _padded(batch) // len(batch.rows[0])
        if size in timed or (timed and time.perf_counter() - begin > SPENT):
            continue
        part = _part(batch, conditions=2)
        plain, watched = _seconds(plan.experiment, of_model, model, part)
        timed[size] = plain / layers / _padded(part), watched / layers / _padded(part)
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
    """A batch with its first conditions only."""
    some = [dict(islice(row.items(), conditions)) for row in batch.rows]
    return replace(batch, rows=tuple(some))


def _seconds(
    experiment: Experiment, of_model: ModelPlan, model: Any, batch: Batch
) -> tuple[float, float]:
    """Seconds of a batch without and with measuring: the smaller of two runs, or one long run.

    If the model generates, both are the time with measuring.
    """
    from attnscope.experiment.batch import measure_batch
    from attnscope.experiment.condition_batch import ConditionBatch
    from attnscope.experiment.forward import forward

    def run_plain() -> None:
        for cells in batch.cells.values():
            inputs = ConditionBatch(experiment, of_model, cells).inputs
            with forward(model, {name: x.to(model.device) for name, x in inputs.items()}, {}):
                pass

    def measured() -> None:
        measure_batch(experiment, of_model, model, batch)

    watched = _best(measured, model.device)
    return watched if experiment.generate is not None else _best(run_plain, model.device), watched


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


def _test_model(plan: Plan, config: Any, of_a_layer: float) -> tuple[Any, int]:
    """A model of this shape with few layers and a small vocabulary, and its number of layers."""
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
