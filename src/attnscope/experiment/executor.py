"""The interface of an executor: it takes batches and yields them measured.

`local.py` is one, in this process; `ray.py` is another, on a cluster. An executor is a function
of one form: it may take the batches in any order and measure several at once. The caller
writes what it yields, unless the worker has written it already.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from attnscope.experiment.cells import Batch
from attnscope.experiment.plan import ModelPlan, Plan

if TYPE_CHECKING:
    from attnscope.experiment.results import Measured


@dataclass(frozen=True, eq=False)
class Work:
    """A batch to send through a model."""

    model: ModelPlan
    batch: Batch

    @property
    def cost(self) -> int:
        """How much there is to compute, roughly: tokens × layers × width²."""
        info = self.model.info
        return self.batch.tokens * (info.layers or 1) * (info.heads or 1) ** 2


@dataclass(frozen=True, eq=False)
class MeasuredPart:
    """Cells that went through the model together: a batch, or what it had to be divided into."""

    batch: Batch
    measured: dict[str, Measured]
    """By condition."""


@dataclass(frozen=True, eq=False)
class Done:
    """A batch, measured as far as it could be."""

    work: Work
    parts: tuple[MeasuredPart, ...]
    """Empty where it is stored already, and where nothing could be measured."""
    failed: dict[int, str]
    """Prompts that could not be measured, with their errors."""
    about: dict[str, Any] | None
    """The model as it was loaded: its entry in `environment.json`, the same for all its batches.
    None where it could not be."""
    stored: bool = False
    """Whether the worker has written it."""


class Executor(Protocol):
    """Measures batches, in any order."""

    def __call__(
        self, plan: Plan, pending: Sequence[Work], *, threads: int
    ) -> Generator[Done, None, None]:
        """Every batch once. `threads` is how many a sum may be divided among on a CPU: its last
        digits depend on that, so it is part of what was recorded.
        """
