"""What was measured, as arrays: the numbers of a condition, in columns per stored head.

A column says which keys, classes, measure and item its numbers are of; it is the same for every
prompt of a batch, so that tables can be built without looking at single numbers.

Shapes: B prompts, K tokens of the longest, S stored heads (of all layers, one after the other),
C columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.measures.layer import Array

if TYPE_CHECKING:
    from attnscope.experiment.cells import Cell


class Column(NamedTuple):
    """What a number is, beside its layer and head."""

    keys: str
    classes: str | None
    measure: str
    item: str | None
    target: str | None


@dataclass(eq=False)
class HeadValues:
    """The numbers of one condition under one choice of queries."""

    queries: str
    heads: list[tuple[int, int | None]]
    """[S] layer and head; None where a number is of the whole layer."""
    columns: list[Column] = field(default_factory=list)
    numbers: list[tuple[Array, ...]] = field(default_factory=list)
    """Value, uniform, tokens and error, [B, S, C] in parts; nan where there is no number."""

    def add(self, columns: list[Column], numbers: tuple[Array, ...]) -> None:
        """Columns and their numbers."""
        self.columns += columns
        self.numbers.append(numbers)


class Profile(NamedTuple):
    """A number for each token of some heads."""

    heads: list[tuple[int, int]]
    """[S] layer and head."""
    columns: dict[str, NDArray[np.float32]]
    """By name [B, S, K]."""


class QueryValues(NamedTuple):
    """Numbers for each query of some heads, or for bins of queries."""

    queries: str
    heads: list[tuple[int, int]]
    """[S] layer and head."""
    columns: list[Column]
    positions: NDArray[np.int64]
    """[B, N] the first position of each bin, -1 where no query counts."""
    counts: NDArray[np.int64]
    """[B, N] how many do."""
    value: NDArray[np.float32]
    """[B, S, N, C]"""


@dataclass(eq=False)
class Measured:
    """The numbers of one condition of a batch."""

    readings: list[HeadValues]
    profiles: dict[str, Profile]
    """By queries; empty if not asked for."""
    series: list[QueryValues] = field(default_factory=list)
    """Of measures at level `query`."""
    cells: tuple[Cell, ...] = ()
    """As they were measured, where that is more than was planned: with the model's answers."""
