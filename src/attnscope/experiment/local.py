"""Measuring in this process: model by model, batch by batch.

This module must not know files or tables.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from attnscope.errors import InputError
from attnscope.experiment.batch import measure_batch
from attnscope.experiment.environment import describe_model
from attnscope.experiment.executor import Done, Work
from attnscope.experiment.plan import ModelPlan, Plan

__all__ = ["local"]


def local(plan: Plan, pending: Sequence[Work], *, threads: int) -> Generator[Done, None, None]:
    """Load each model once and send its batches through it."""
    with _threads(threads):
        for of_model in plan.models:
            its = [work for work in pending if work.model is of_model]
            if not its:
                continue
            model, about = _loaded(plan, of_model)
            for work in its:
                measured = measure_batch(plan.experiment, of_model, model, work.batch)
                yield Done(work, measured, about)


def _loaded(plan: Plan, of_model: ModelPlan) -> tuple[Any, dict[str, Any]]:
    from attnscope.capture.watch import watch
    from attnscope.loading import find, load

    experiment = plan.experiment
    model, _ = load(
        of_model.facts.pinned,
        device=experiment.device,
        dtype=experiment.dtype,
        bos=experiment.bos,
    )
    if find(of_model.facts.pinned).revision != of_model.facts.revision:
        raise InputError(
            f"model {of_model.label!r} ({of_model.facts.name}) changed while it was loaded; start "
            "again, when it is finished"
        )
    layers = None if of_model.layers is None else list(of_model.layers)
    with watch(model, layers=layers, backend=experiment.backend) as scope:
        backend = scope.backend  # no pass: only to see that the layers exist, and what measures
    return model, describe_model(of_model, model, backend)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """So many threads inside, as many as before afterwards."""
    import torch

    before = torch.get_num_threads()
    if number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
