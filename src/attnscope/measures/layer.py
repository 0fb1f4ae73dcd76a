"""What a measure may look at: one layer of a batch, under one choice of queries.

Shapes: B sequences, H query heads, G key/value heads, K keys (positions), C classes. Tensors are on
the layer's own device.

The measures are declared for rooms that never load torch, so nothing here imports it: functions
keep to the tensors' own methods, or import it when they are called. This room must not know models,
prompts or files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor as Tensor  # measures have it from here
else:
    Tensor = Any

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def or_nan(count: Tensor) -> Tensor:
    """A number to divide by: nan in place of 0."""
    return count.where(count > 0, np.nan)


def mean_over_queries(total: Tensor, count: Tensor) -> Tensor:
    """[B, H] sums over queries to means; nan for a sequence without queries."""
    return (total / or_nan(count)[:, None]).float()


@dataclass(eq=False, kw_only=True)
class Sums:
    """What the counted queries of one layer add up to, as the kernels have it."""

    count: Tensor
    """float64 [B]: the number of queries, |Q|."""
    received: Tensor
    """float32 [B, H, K]"""
    later: Tensor
    """float32 [B, H, K]: received from queries after the key."""
    entropy: Tensor
    """float32 [B, H]"""
    own: Tensor
    """float32 [B, H]: what queries give to themselves."""
    first: Tensor
    """int64 [B]: position of the first real token."""
    exposed: Callable[[str], Tensor]
    """What visibility alone decides, by its name: the fields of
    `capture.frame.VisibilityCounts`."""
    sink: Tensor | None = None
    """float64 [B, H]: what learned sinks took; None where the layer has none."""
    sink_position: Tensor | None = None
    """float64 [B, H]: the same, times the position of the query."""
    flow: Tensor | None = None
    """float32 [B, H, groups, K]: received from each group of queries."""
    error: Tensor | None = None
    """float32 [B, H, K]: standard error of `received`; None where no query was left out, as in the
    next."""
    entropy_error: Tensor | None = None
    """float32 [B, H]"""
    seen_alike: Any = None
    """Layers of a pass in which this is the same have `count`, `first` and `exposed` in common;
    None where nobody knows."""

    @cached_property
    def average(self) -> Tensor:
        """float32 [B, H, K]: average attention weight; nan where no later query could look."""
        could = self.exposed("eligible_later").float()[:, None]
        return (self.later / could.clamp(min=1)).where(could > 0, np.nan)

    @cached_property
    def averages(self) -> Array:
        """The same in float64, for measures that compare token by token."""
        return numpy_of(self.average)

    @cached_property
    def uniform(self) -> Array:
        """float64 [B, 1, K]: what `average` would be if every query spread its attention evenly
        over the keys it sees. The same for every head, since visibility alone decides it."""
        could = numpy_of(self.exposed("eligible_later"))
        given = numpy_of(self.exposed("uniform_later"))
        return np.where(could > 0, given / np.maximum(could, 1), np.nan)[:, None]

    def of_heads(self, heads: Sequence[int]) -> Sums:
        """These heads alone."""
        if list(heads) == list(range(self.received.shape[1])):
            return self
        picked = list(heads)
        return replace(self, **{name: sums[:, picked] for name, sums in self._of_heads().items()})

    def of_nobody(self) -> Sums:
        """As if no query had counted: of the same shape, and every mean of it is nan."""
        nothing = {name: sums.new_zeros(sums.shape) for name, sums in self._of_heads().items()}

        def exposed(name: str) -> Tensor:
            real = self.exposed(name)
            return real.new_zeros(real.shape)

        return replace(
            self, count=self.count.new_zeros(len(self.count)), exposed=exposed, **nothing
        )

    def _of_heads(self) -> dict[str, Any]:
        always = ("received", "later", "entropy", "own")
        names = (*always, "sink", "sink_position", "flow", "error", "entropy_error")
        return {name: sums for name in names if (sums := getattr(self, name)) is not None}


@dataclass(eq=False, kw_only=True)
class PerQuery:
    """What single queries look at, where a pass has kept them."""

    positions: Tensor
    """int64 [B, M]: where they stand; -1 for none."""
    read: Callable[..., Any]
    """What a scope has of every query, by the name of its method and what that takes beside the
    layer: [B, H, M, …], nan where there is no query."""


@dataclass(eq=False, kw_only=True)
class Baseline:
    """The base that a variant is compared with, and which tokens are twins."""

    base: Sums
    twin: NDArray[np.int64]
    """[B, K of variant]: the base token of each token, -1 for none."""
    inserted: Mask
    """[B, K of variant]"""
    made: Mapping[str, Tensor] = field(default_factory=dict)
    """What the base's layer made, as in `Layer.made`."""

    @cached_property
    def averages(self) -> Array:
        """[B, H, K of variant]: the base's averages, at the places of their twins."""
        return on_variant(self.base.averages, self.twin)

    @cached_property
    def uniform(self) -> Array:
        """[B, 1, K of variant]: the same under uniform attention."""
        return on_variant(self.base.uniform, self.twin)


@dataclass(eq=False, kw_only=True)
class Layer:
    """One layer of a batch, under one choice of queries."""

    sums: Sums
    made: Mapping[str, Tensor] = field(default_factory=dict)
    """What the layer made, by the name in `Measure.needs`: values [B, G, K, size], heads and
    outputs [B, K, size], activations [B, K, sums of each token]; with those histogram [B, bins
    and the Gini coefficient]."""
    keys: Mask = field(default_factory=lambda: np.ones((1, 1), dtype=bool))
    """[B, K]: the keys that count; all of them, if nobody says."""
    shares: Tensor | None = None
    """float64 [B, K, C]: the share of each token in each class, 0 for keys that do not count; nan
    where a prompt has no such keys."""
    groups: Tensor | None = None
    """float64 [groups, C]: 1 where a group of queries is of a class."""
    pair: Baseline | None = None
    rows: PerQuery | None = None
    tokens: NDArray[np.int64] | None = None
    """[B, K]: the ids of the tokens, -1 for padding."""
    following: NDArray[np.int64] | None = None
    """[B, K]: the token that came after each, also the last of an answer; -1 where none did."""
    begins: Any = ()
    """[B]: where the answer begins; -1 where there is none."""
    steps: int = 0
    """How many tokens an answer may have."""

    @property
    def single(self) -> PerQuery:
        """Single queries: there are those for every measure that needs `rows`."""
        assert self.rows is not None
        return self.rows

    @property
    def of_tokens(self) -> NDArray[np.int64]:
        """The ids of the tokens, for a measure that goes by them."""
        if self.tokens is None:
            raise InputError(
                "this measure compares token ids, and this forward pass has none; call the model "
                "with input_ids, without inputs_embeds",
                code="no-token-ids",
            )
        return self.tokens

    @property
    def against(self) -> Baseline:
        """The base: there is one for every measure that declares `pair`."""
        assert self.pair is not None
        return self.pair


def side_by_side(layers: Sequence[Layer], most: int = 1 << 22) -> list[Layer]:
    """Neighbours that are seen alike as one layer with the heads of all, one after the other, as
    long as these receive no more than `most` numbers: for measures that take each head by itself
    and look at nothing but sums. What is left of a short text then is one operation."""
    joined: list[list[Sums]] = []
    for layer in layers:
        sums, before = layer.sums, joined[-1] if joined else []
        held = sum(one.received.numel() for one in (*before, sums))
        if before and held <= most and _alike(before[-1], sums):
            before.append(sums)
        else:
            joined.append([sums])
    return [replace(layers[0], sums=_beside(some), made={}, rows=None) for some in joined]


def _alike(one: Sums, other: Sums) -> bool:
    def told(sums: Sums) -> Any:
        kinds = {name: (of.dtype, of.device) for name, of in sums._of_heads().items()}
        return sums.seen_alike, kinds, sums.received.shape[-1]

    return one.seen_alike is not None and told(one) == told(other)


def _beside(some: Sequence[Sums]) -> Sums:
    if len(some) == 1:
        return some[0]
    from torch import cat

    parts = [sums._of_heads() for sums in some]
    joined: dict[str, Any] = {name: cat([of[name] for of in parts], 1) for name in parts[0]}
    return replace(some[0], **joined)


def on_variant(base: Array, twin: NDArray[np.int64]) -> Array:
    """Numbers of the base's tokens [B, H, K of base], at the places of their twins; else nan."""
    where = np.broadcast_to(np.maximum(twin, 0)[:, None], (*base.shape[:2], twin.shape[1]))
    return np.where((twin < 0)[:, None], np.nan, np.take_along_axis(base, where, axis=2))


def numpy_of(tensor: Tensor) -> Array:
    """A tensor as float64 on the CPU."""
    array: Array = tensor.cpu().double().numpy()
    return array
