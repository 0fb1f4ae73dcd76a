"""Measures one batch of every model and extrapolates to the plan, for `run --check`."""

import sys
import time
from dataclasses import dataclass, replace

from attnscope.errors import ModelError
from attnscope.experiment.cells import Batch
from attnscope.experiment.executor import Done, Work
from attnscope.experiment.local import LOAD_WITHIN, Measurer
from attnscope.experiment.plan import ModelPlan, Plan


@dataclass(frozen=True)
class Estimate:
    """The size of one model's part of a plan, and its time and memory."""

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
    """Of all batches, without loading."""
    bytes: int | None
    """Largest memory of the process, or on the GPU, so far; None if the system reports none."""


def estimate(plan: Plan, *, load_within: float = LOAD_WITHIN) -> list[Estimate]:
    """Load each model and measure its batch of median size. The result is not stored."""
    import torch

    measure = Measurer(plan, torch.get_num_threads(), load_within)
    try:
        return [_estimate(plan, model, measure) for model in plan.models]
    finally:
        measure.close()


def _estimate(plan: Plan, model: ModelPlan, measure: Measurer) -> Estimate:
    median = sorted(model.batches, key=_padded)[len(model.batches) // 2]
    first_prompt = replace(median, numbers=median.numbers[:1], rows=median.rows[:1])
    _measured(measure, model, first_prompt)  # loads the model and warms up
    start = time.perf_counter()
    done = _measured(measure, model, median)
    seconds = time.perf_counter() - start
    lengths = [cells for batch in model.batches for cells in batch.lengths()]
    assert done.about is not None
    return Estimate(
        label=model.label,
        name=model.info.name,
        cells=sum(map(len, lengths)),
        batches=len(model.batches),
        passes=len(model.batches) * len(plan.experiment.conditions),
        tokens=sum(map(sum, lengths)),
        longest=max(map(max, lengths)),
        parameters=done.about["parameters"],
        seconds=seconds * sum(map(_padded, model.batches)) / _padded(median),
        bytes=_peak(done.about["device"]),
    )


def _measured(measure: Measurer, model: ModelPlan, batch: Batch) -> Done:
    done = measure(Work(model, batch))
    if done.failed:
        prompt, why = next(iter(done.failed.items()))
        raise ModelError(
            f"model {model.label!r}, prompt {prompt} cannot be measured: {why}",
            code="check-failed",
            model=model.label,
            prompt=prompt,
        )
    return done


def _padded(batch: Batch) -> int:
    """Tokens of a batch with all conditions, padding included."""
    return sum(len(cells) * max(cells) for cells in batch.lengths())


def _peak(device: str) -> int | None:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
