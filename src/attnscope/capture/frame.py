"""Who can see whom in one forward pass, and which of those queries were asked for.

A `Frame` is what a mask says; a `Selection` is a frame under a choice of queries. Both are made
on the CPU once per mask and forward pass, and shared by all layers that use the mask.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscope.kernels import Visible

__all__ = ["Exposure", "Frame", "Part", "Selection"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Exposure:
    """Everything about the counted queries that no score is needed for. On the CPU."""

    count: Tensor
    """float64 [B]: the number of queries, |Q|."""
    position: Tensor
    """float64 [B]: the sum of their positions."""
    eligible: Tensor
    """float64 [B, keys]: counted queries that see the key."""
    eligible_later: Tensor
    """float64 [B, keys]: those of them after the key."""
    uniform: Tensor
    """float64 [B, keys]: what the key would receive if every query spread its attention evenly."""
    groups: Tensor | None
    """float64 [B, classes]: counted queries per class, where classes were given."""

    def empty(self) -> "Exposure":
        """No queries yet, no keys yet."""
        none = torch.zeros_like(self.eligible[:, :0])
        return Exposure(
            count=torch.zeros_like(self.count),
            position=torch.zeros_like(self.position),
            eligible=none,
            eligible_later=none,
            uniform=none,
            groups=None if self.groups is None else torch.zeros_like(self.groups),
        )

    def plus(self, other: "Exposure", first_key: int) -> "Exposure":
        """Both together; key 0 of the other is at position `first_key`."""

        def join(mine: Tensor, theirs: Tensor) -> Tensor:
            theirs = pad(theirs, (first_key, 0))
            width = max(mine.shape[-1], theirs.shape[-1])
            return pad(mine, (0, width - mine.shape[-1])) + pad(
                theirs, (0, width - theirs.shape[-1])
            )

        both = self.groups is not None and other.groups is not None
        return Exposure(
            count=self.count + other.count,
            position=self.position + other.position,
            eligible=join(self.eligible, other.eligible),
            eligible_later=join(self.eligible_later, other.eligible_later),
            uniform=join(self.uniform, other.uniform),
            groups=self.groups + other.groups if both else None,  # type: ignore[operator]
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Part:
    """Rows a kernel takes in one go: all queries in order (`index` None) or a gathered few."""

    index: Tensor | None
    """int64 [B, M], which queries."""
    start: Tensor
    """int32 [B, M]"""
    stop: Tensor
    own: Tensor
    causal: bool = False
    weight: Tensor | None = None
    shrink: Tensor | None = None
    group: Tensor | None = None
    cache: dict[Any, Any] = field(default_factory=dict)
    """As in `Rows`."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Selection:
    """The rows to reduce in one pass, and their exposure."""

    whole: Part
    """Every counted row over all it sees."""
    parts: tuple[Part, ...]
    """Rows whose totals add up to those of `whole`: just `whole`, unless far keys are sampled."""
    counted: Tensor
    """bool [B, M]: which rows of `whole` count. On the CPU."""
    exposure: Exposure

    @property
    def sampled(self) -> bool:
        """Whether the totals are estimates."""
        return self.parts[0] is not self.whole


@dataclass(slots=True, eq=False, kw_only=True)
class Frame:
    """The geometry of one attention call: positions, padding, visible intervals."""

    visible: Visible
    """Intervals on the model's device, as the kernels take them."""
    start: Tensor
    """int64 [B, Q] on the CPU, as in `Visible`."""
    stop: Tensor
    real_queries: Tensor | None
    """bool [B, Q] on the CPU; None where no query is padding."""
    real_keys: Tensor | None
    """bool [B, K] on the CPU, given only when padding lies inside the intervals."""
    first_query: int
    """Position of query 0 in the sequence (more than 0 with a cache)."""
    first_key: int
    """Position of key 0 in the sequence (more than 0 when a windowed cache has dropped some)."""
    keys: int
    device: torch.device
    selections: dict[int, Selection | None] = field(default_factory=dict)
    """Selections already made, by the length of the prompt they were made for."""
    exposures: dict[int, tuple[Exposure | None, Exposure]] = field(default_factory=dict)
    """Earlier exposures and their sums with this pass's, by the identity of the earlier one."""
    elsewhere: dict[torch.device, "Frame"] = field(default_factory=dict)
    """The same frame on other devices, for models that are spread over several."""

    def on(self, device: torch.device) -> "Frame":
        """This frame with its intervals on the given device."""
        if device == self.device:
            return self
        if device not in self.elsewhere:
            seen = self.visible
            real = None if seen.real is None else seen.real.to(device)
            moved = replace(
                seen, start=seen.start.to(device), stop=seen.stop.to(device), real=real, cache={}
            )
            self.elsewhere[device] = replace(
                self, visible=moved, device=device, selections={}, exposures={}, elsewhere={}
            )
        return self.elsewhere[device]

    def counts(self) -> Tensor:
        """int64 [B, Q]: keys each query sees."""
        on_cpu = Visible(start=self.start, stop=self.stop, form="interval", real=self.real_keys)
        return on_cpu.counts()

    def first_real(self) -> Tensor:
        """int64 [B]: index of the first query that is not padding."""
        if self.real_queries is None:
            return torch.zeros(self.start.shape[0], dtype=torch.int64)
        return self.real_queries.int().argmax(1)

    def positions(self) -> Tensor:
        """int64 [Q]: positions of the queries in the sequence."""
        return torch.arange(self.first_query, self.first_query + self.start.shape[1])
