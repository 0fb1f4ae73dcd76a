"""What carries out a plan: something that is given batches and yields them measured.

`local.py` is one, in this process. Another (on a cluster, say) is a function of the same form:
it may take the batches in any order and measure several at once; whoever calls it is the only one
that writes.

This module must not know files, tables or how anything is measured.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from attnscope.experiment.plan import Batch, ModelPlan, Plan

if TYPE_CHECKING:
    from attnscope.experiment.measured import Measured

__all__ = ["Done", "Executor", "Work"]


@dataclass(frozen=True, eq=False)
class Work:
    """A batch to send through a model."""

    model: ModelPlan
    batch: Batch


@dataclass(frozen=True, eq=False)
class Done:
    """A batch, measured."""

    work: Work
    measured: dict[str, Measured]
    """By condition."""
    about: dict[str, Any]
    """The model as it was loaded: its entry in `environment.json`, the same for all its batches."""


class Executor(Protocol):
    """Measures batches, in any order."""

    def __call__(
        self, plan: Plan, pending: Sequence[Work], *, threads: int
    ) -> Generator[Done, None, None]:
        """Every batch once. `threads` is how many a sum may be divided among on a CPU: its last
        digits depend on that, so it is part of what was recorded.
        """
