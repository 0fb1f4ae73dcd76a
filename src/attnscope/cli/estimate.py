"""What a plan will take, roughly: for `run --check`.

Time and memory are estimated from the model's shape and a matrix product timed on the
spot; they say whether to wait or to go for lunch, nothing finer.

This module must not know how anything is measured or stored.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from attnscope.experiment.plan import ModelPlan, Plan
from attnscope.loading import load_config
from attnscope.question.spec import Experiment

# Seconds that one layer of one watched forward pass costs however small it is.
OVERHEAD = {"cpu": 1.0e-3, "cuda": 0.6e-3}


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
    speed = _speed(plan.device)
    return [_estimate(plan, model, speed) for model in plan.models]


def _estimate(plan: Plan, model: ModelPlan, speed: float) -> Estimate:
    experiment = plan.experiment
    config = load_config(model.facts.pinned)
    text = config.get_text_config()
    parameters, of_layers = _parameters(config)
    hidden = int(getattr(text, "hidden_size", 0) or 0)
    layers, heads = model.facts.layers or 0, model.facts.heads or 0
    measured = layers if model.layers is None else len(model.layers)
    watches = len(experiment.queries)  # beside one another, in one pass
    flops = largest = rows = 0.0
    for batch in model.batches:
        for cells in batch.cells.values():
            width = max(len(cell.tokens) for cell in cells)
            tokens = width * len(cells)
            attended = tokens * width * hidden
            flops += 2 * of_layers * tokens + 4 * layers * attended
            flops += 12 * watches * measured * attended
            largest = max(largest, tokens)
            rows = max(rows, tokens * heads * measured)
    kind = plan.device.partition(":")[0]
    passes = len(model.batches) * len(experiment.conditions)
    width_of = 4 if _full(experiment, plan.device) else 2
    working = largest * (hidden * 12 + int(getattr(text, "intermediate_size", 0) or 0) * 2)
    lengths = [len(cell.tokens) for batch in model.batches for cell in batch]
    return Estimate(
        label=model.label,
        name=model.facts.name,
        cells=len(lengths),
        batches=len(model.batches),
        passes=passes,
        tokens=sum(lengths),
        longest=max(lengths),
        parameters=parameters,
        seconds=flops / speed + passes * watches * layers * OVERHEAD.get(kind, OVERHEAD["cpu"]),
        bytes=int(parameters * width_of + working * width_of + watches * rows * 8 * 3),
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


def _speed(device: str) -> float:
    """Multiplications and additions a second, of a matrix product."""
    import torch

    where = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    size = 512 if where == "cpu" else 4096
    kind = torch.float32 if where == "cpu" else torch.bfloat16
    a = torch.ones(size, size, device=where, dtype=kind)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        (a @ a).sum().item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 2  # no model keeps up with a square product
