"""The declaration of a measure: its name, its columns, what it needs, and its function."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from attnscope.measures.layer import Array, Layer, Tensor

Level = Literal["head", "key/value head", "layer", "text", "token", "query"]
Need = Literal[
    "sums",
    "flow",
    "max_logit",
    "rows",
    "values",
    "heads",
    "outputs",
    "activations",
    "residual",
    "next_token",
    "sound",
    "box",
]
Range = tuple[float, float]
"""The smallest and the largest possible value."""
SHARE: Range = (0.0, 1.0)
POSITIVE: Range = (0.0, math.inf)
ANY: Range = (-math.inf, math.inf)
Per = Literal["keys", "classes", "class pairs", "steps"]


@dataclass(eq=False)
class Numbers:
    """The result of a measure. The last axis is columns, items or classes."""

    value: Tensor | Array
    """[B, heads] or [B, heads, …], at level `query` [B, heads, Q] or [B, heads, Q, …]; nan where a
    number is not defined."""
    uniform: Tensor | Array | None = None
    """The value under uniform attention; it may have fewer heads, and so may `tokens`."""
    tokens: Tensor | Array | None = None
    """The number of tokens that a value covers."""
    error: Tensor | Array | None = None
    """The standard error, if queries were sampled; None if not known."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One measure: its name, what it needs, and the numbers it returns."""

    name: str
    """The name in the list `measures` of an experiment."""
    description: str
    """The definition in one line."""
    level: Level
    """What one number is for; `text` gives one without layer and head, `token` and `query` give one
    for each of each head."""
    function: Callable[[Layer], Numbers | Tensor]
    needs: frozenset[Need] = frozenset({"sums"})
    """What a forward pass must keep. Without `sums`, `flow` or `rows` the choice of queries has no
    effect, and the numbers are stored under `all`."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Names of its numbers in a run, with their definitions; default: `name` alone."""
    items: tuple[str, ...] = ()
    """Each number exists once per item; the column `item` holds it."""
    default: str | None = None
    """The default item."""
    per: frozenset[Per] = frozenset()
    """The settings of an experiment for which it is measured separately."""
    about_generation: bool = False
    """Whether it measures a completion."""
    compares_to_base: bool = False
    """Whether it compares a variant with its base."""
    range: Range | Mapping[str, Range] = ANY
    """Possible values of all columns, or by column; confidence intervals are clipped to them."""

    def __post_init__(self) -> None:
        if not self.columns:
            object.__setattr__(self, "columns", {self.name: self.description})

    def numbers(self, layer: Layer) -> Numbers:
        """The numbers of one layer."""
        result: Any = self.function(layer)
        return result if isinstance(result, Numbers) else Numbers(result)
