"""What a plan will take, roughly: for `run --check`.

Time comes from a stand-in timed on the spot: a layer or two of the model's shape, with weights of
its own, over some of the plan's batches, plain and watched, for about a second. Memory comes from
the shape alone. They say whether to wait or to go for lunch, nothing finer.

This module must not know how anything is stored.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnscope.experiment.plan import ModelPlan, Plan
from attnscope.loading import load_config
from attnscope.question.spec import Experiment

# The stand-in: tokens it knows, layers, and fewer of them from this many parameters each on.
WORDS, LAYERS, WIDE = 1000, 2, 50_000_000
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
    config = load_config(model.facts.pinned)
    text = config.get_text_config()
    parameters, of_layers = _parameters(config)
    hidden = int(getattr(text, "hidden_size", 0) or 0)
    layers, heads = model.facts.layers or 0, model.facts.heads or 0
    measured = layers if model.layers is None else len(model.layers)
    watches = len(experiment.queries)  # beside one another, in one pass
    lengths = [cells for batch in model.batches for cells in batch.lengths()]
    shapes = [(len(cells), max(cells)) for cells in lengths]
    largest = max(B * K for B, K in shapes)
    rows = largest * heads * measured
    speed = _speed(plan, config, of_layers / max(1, layers), shapes, watches)
    seconds = 0.0
    for shape in shapes:
        plain, watched = speed(shape)
        seconds += layers * plain + measured * max(0.0, watched - plain)
    passes = len(model.batches) * len(experiment.conditions)
    width_of = 4 if _full(experiment, plan.device) else 2
    working = largest * (hidden * 12 + int(getattr(text, "intermediate_size", 0) or 0) * 2)
    return Estimate(
        label=model.label,
        name=model.facts.name,
        cells=sum(map(len, lengths)),
        batches=len(model.batches),
        passes=passes,
        tokens=sum(map(sum, lengths)),
        longest=max(map(max, lengths)),
        parameters=parameters,
        seconds=seconds,
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


Speed = Callable[[tuple[int, int]], tuple[float, float]]
"""Of a batch [prompts, tokens of the longest]: seconds of a layer, plain and watched."""


def _speed(
    plan: Plan, config: Any, of_a_layer: float, shapes: list[tuple[int, int]], watches: int
) -> Speed:
    """Time a stand-in on the median, the smallest and the largest batch, as far as time allows."""
    import numpy as np
    import torch

    model, layers = _stand_in(plan, config, of_a_layer)
    ordered = sorted(set(shapes), key=lambda shape: (shape[0] * shape[1], shape))
    timed: dict[int, tuple[float, float]] = {}
    begin = time.perf_counter()
    _seconds(model, (1, 2), watches)  # what is done once for a process
    with torch.no_grad():
        for shape in dict.fromkeys((ordered[len(ordered) // 2], ordered[0], ordered[-1])):
            if timed and time.perf_counter() - begin > SPENT:
                break
            plain, watched = _seconds(model, shape, watches)
            tokens = shape[0] * shape[1]
            timed[tokens] = plain / layers / tokens, watched / layers / tokens

    known = sorted(timed)

    def speed(shape: tuple[int, int]) -> tuple[float, float]:
        tokens = shape[0] * shape[1]
        plain, watched = (
            float(np.interp(tokens, known, [timed[n][which] for n in known])) for which in (0, 1)
        )
        return plain * tokens, watched * tokens

    return speed


def _seconds(model: Any, shape: tuple[int, int], watches: int) -> tuple[float, float]:
    """Of a pass over a batch of this shape, plain and watched: the better of two each."""
    import torch

    from attnscope.experiment.forward import forward

    inputs = {"input_ids": torch.randint(0, WORDS, shape, device=model.device)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1:, -1] = 0  # batches are padded, or nearly all of them
    best = [float("inf")] * 2
    for _ in range(2):
        for which, choices in enumerate(({}, {str(n): "all" for n in range(watches)})):
            start = time.perf_counter()
            with forward(model, inputs, choices):
                if model.device.type == "cuda":
                    torch.cuda.synchronize()
            best[which] = min(best[which], time.perf_counter() - start)
    return best[0], best[1]


def _stand_in(plan: Plan, config: Any, of_a_layer: float) -> tuple[Any, int]:
    """A model of this shape with few layers and words, and how many layers."""
    import torch

    from attnscope.loading import model_class

    small = copy.deepcopy(config)
    text = small.get_text_config()
    layers = min(LAYERS if of_a_layer < WIDE else 1, text.num_hidden_layers)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    text.vocab_size = WORDS
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    where = plan.device if plan.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.float32 if _full(plan.experiment, where) else torch.bfloat16
    model = model_class(small)._from_config(small)
    return model.to(device=where, dtype=kind).eval(), layers
