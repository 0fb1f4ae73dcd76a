"""What an experiment will do, in words and numbers: for `run --check`, and above every result.

The time and the memory are estimates, from the model's shape and a matrix product timed on the
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

__all__ = ["Estimate", "choices", "estimate"]

# Seconds that one layer of one watched forward pass costs however small it is. On a CPU prompts
# are walked one by one, so there each prompt costs something, and each of its key/value heads.
OVERHEAD = {"cpu": 1.0e-3, "cuda": 0.6e-3}
PER_PROMPT, PER_HEAD = 0.5e-3, 0.4e-3


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


def choices(experiment: Experiment) -> list[str]:
    """What the numbers are of: every choice that a reader must know, a line each."""
    profiles = experiment.profiles
    lines = {
        "models": ", ".join(f"{label} ({name})" for label, name in experiment.models.items()),
        "prompts": _prompts(experiment),
        "conditions": "; ".join(_condition(experiment, name) for name in experiment.conditions),
        "layers": "all" if experiment.layers == "all" else _joined(experiment.layers),
        "heads": f"{_heads(experiment.heads)}, each stored by itself; readers combine them by "
        f"{experiment.combine}",
        "queries": _joined(experiment.queries),
        "keys": _joined(experiment.keys),
        "classes": "; ".join(
            f"{label} ({', '.join(_judged(one) for one in kinds)})"
            for label, kinds in experiment.class_sets.items()
        ),
        "measures": _joined(experiment.measures),
        "shown as": experiment.normalise,
    }
    if "profile" in experiment.measures:
        lines["profiles"] = f"layers {_told(profiles.layers)}; heads {_heads(profiles.heads)}"
    width = max(map(len, lines))
    return [f"{what.ljust(width)}  {said}" for what, said in lines.items()]


def _heads(heads: Any) -> str:
    if not isinstance(heads, dict):
        return _told(heads)
    return "; ".join(f"{_told(some)} of {label}" for label, some in heads.items())


def estimate(plan: Plan) -> list[Estimate]:
    """Time and memory for each model, with nothing loaded."""
    speed = _speed(plan.device)
    return [_estimate(plan, model, speed) for model in plan.models]


def _estimate(plan: Plan, model: ModelPlan, speed: float) -> Estimate:
    experiment = plan.experiment
    config = load_config(model.facts.pinned)
    text = config.get_text_config()
    parameters = _parameters(config)
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
            flops += 2 * parameters * tokens + 4 * layers * attended
            flops += 12 * watches * measured * attended
            largest = max(largest, tokens)
            rows = max(rows, tokens * heads * measured)
    kind = plan.device.partition(":")[0]
    passes = len(model.batches) * len(experiment.conditions)
    width_of = 4 if _full(experiment, plan.device) else 2
    working = largest * (hidden * 12 + int(getattr(text, "intermediate_size", 0) or 0) * 2)
    walked = layers * PER_PROMPT + measured * (model.facts.kv_heads or 1) * PER_HEAD
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
        seconds=flops / speed
        + passes * watches * layers * OVERHEAD.get(kind, OVERHEAD["cpu"])
        + (watches * len(lengths) * walked if kind == "cpu" else 0.0),
        bytes=int(parameters * width_of + working * width_of + watches * rows * 8 * 3),
    )


def _full(experiment: Experiment, device: str) -> bool:
    return experiment.dtype == "float32" or (experiment.dtype == "auto" and device == "cpu")


def _parameters(config: Any) -> int:
    """Counted on a model without memory."""
    import torch

    from attnscope.loading import model_class

    with torch.device("meta"):
        empty = model_class(config)._from_config(config)
    return sum(parameter.numel() for parameter in empty.parameters())


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


def _told(numbers: Any) -> str:
    return "all" if numbers == "all" else _joined(numbers)


def _joined(things: Any) -> str:
    return ", ".join(map(str, things))


def _prompts(experiment: Experiment) -> str:
    options = experiment.prompts.model_dump(exclude={"source", "count"}, exclude_none=True)
    told = ", ".join(f"{key} {value}" for key, value in options.items() if value != {})
    count = experiment.prompts.count or "all"
    chat = "in the chat template" if experiment.chat else "as plain text"
    if experiment.bos:
        chat += ", begun with the begin-of-sequence token"
    return f"{count} {experiment.prompts.source} ({told}), {chat}"


def _condition(experiment: Experiment, name: str) -> str:
    condition = experiment.conditions[name]
    if condition.insert is None:
        return f"{name} (the prompt as it is)"
    what = condition.insert
    unit = f" {what.filler(0).repeated!r}" if what.kind in ("repeat", "word") else ""
    return f"{name} ({what.count} × {what.kind}{unit}, {condition.position}, by {condition.by})"


def _judged(one: Any) -> str:
    return f"{one.name} by fraction" if one.judgement == "fraction" else one.name
