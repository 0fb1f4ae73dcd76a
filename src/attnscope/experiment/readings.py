"""What was measured, as arrays: the numbers of a condition, in columns per stored head.

A column says which keys, classes, measure and item its numbers are of; it is the same for every
prompt of a batch, so that tables can be built without looking at single numbers.

Shapes: B prompts, K tokens of the longest, S stored heads (of all layers, one after the other),
C columns.

This module must not know models, prompts or files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "Column", "Mask", "Measured", "Reading"]

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Column(NamedTuple):
    """What a number is, beside its layer and head."""

    keys: str
    classes: str | None
    measure: str
    item: str | None
    target: str | None


@dataclass(eq=False)
class Reading:
    """The numbers of one condition under one choice of queries."""

    queries: str
    heads: list[tuple[int, int | None]]
    """[S] layer and head; None where a number is of the whole layer."""
    columns: list[Column] = field(default_factory=list)
    value: list[Array] = field(default_factory=list)
    """[B, S, C] in parts, as are the two below; nan where there is no number."""
    uniform: list[Array] = field(default_factory=list)
    tokens: list[Array] = field(default_factory=list)

    def add(
        self, columns: list[Column], value: Array, uniform: Any = np.nan, tokens: Any = np.nan
    ) -> None:
        """Columns and their numbers [B, S, C]; what is not given is nan."""
        self.columns += columns
        self.value.append(value)
        self.uniform.append(np.broadcast_to(uniform, value.shape))
        self.tokens.append(np.broadcast_to(tokens, value.shape))


@dataclass(eq=False)
class Measured:
    """The numbers of one condition of a batch."""

    readings: list[Reading]
    profiles: dict[str, tuple[list[tuple[int, int]], NDArray[np.float32], NDArray[np.float32]]]
    """By queries: layers and heads [S], average and received [B, S, K]; empty if not asked for."""
