"""A measure, declared: everything that the spec, the runner, the claims and the docs have to know
about it, beside its definition. This module must not know any measure.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from attnscope.measures.layer import Array, Layer, Tensor

Level = Literal["head", "key/value head", "layer", "token", "query"]
Need = Literal["sums", "flow", "rows", "values", "heads", "outputs", "activations"]
Range = tuple[float, float]
"""The least and the largest value that is possible."""
SHARE: Range = (0.0, 1.0)
POSITIVE: Range = (0.0, math.inf)
ANY: Range = (-math.inf, math.inf)
Over = Literal["keys", "classes", "class pairs", "steps"]


@dataclass(eq=False)
class Numbers:
    """What a measure found. The last axis goes over columns, items, or classes."""

    value: Tensor | Array
    """[B, heads] or [B, heads, …], at level `query` [B, heads, Q] or [B, heads, Q, …]; nan where a
    number is not defined."""
    uniform: Tensor | Array | None = None
    """What uniform attention would give; it may have fewer heads, as may the next."""
    tokens: Tensor | Array | None = None
    """How many tokens a number is about."""
    error: Tensor | Array | None = None
    """The standard error of a number, where queries were sampled; None where it is not known."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One idea: how it is asked for, what it needs, and the numbers it gives."""

    name: str
    """What an experiment lists under `measures`."""
    about: str
    """The definition in a line."""
    level: Level
    """What there is one number of (of `token` and `query`: one for each of each head)."""
    function: Callable[[Layer], Numbers | Tensor]
    needs: frozenset[Need] = frozenset({"sums"})
    """What has to be kept of a forward pass. Without `sums` or `flow`, no choice of queries
    matters, and the numbers stand under `all`."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The names its numbers have in a run, each with its definition; its own, if it has one."""
    items: tuple[str, ...] = ()
    """Each number comes once for each of these; they stand under `item`."""
    default: str | None = None
    """Which of the items is meant when nobody says."""
    over: frozenset[Over] = frozenset()
    """Which choices of an experiment it is measured under, each in turn."""
    answers: bool = False
    """Whether it is about what a model generates."""
    pair: bool = False
    """Whether it compares a variant with its base."""
    range: Range | Mapping[str, Range] = ANY
    """The possible values of all its columns, or by column: an interval of a mean has no others."""

    def __post_init__(self) -> None:
        if not self.columns:
            object.__setattr__(self, "columns", {self.name: self.about})

    def numbers(self, layer: Layer) -> Numbers:
        """Measure."""
        found: Any = self.function(layer)
        return found if isinstance(found, Numbers) else Numbers(found)
