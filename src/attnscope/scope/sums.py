"""Sums over the counted queries of a text, as blocks of layers that were reduced together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscope.kernels import AttentionSums
from attnscope.scope.query_selection import QuerySelection
from attnscope.scope.stored_rows import StoredRows

BY_KEY = ("received", "received_later", "variance", "flow")
BY_HEAD = ("mass", "entropy", "self_mass", "entropy_variance", "sink", "sink_position")
LARGEST = ("lse_error", "score_bound")
"""Fields of `AttentionSums` of which the largest value of all calls is kept; None counts as 0."""


@dataclass(slots=True, eq=False, kw_only=True)
class SumsBlock:
    """Sums of some layers, stacked along the batch: layer `layers[i]` has the rows from `i · B`.

    Keys are positions of the sequence. Layers are split when one is read: the views of 30 layers
    take 0.4 ms, and often no layer is read.
    """

    layers: tuple[int, ...]
    dtype: torch.dtype
    """The dtype of the queries, or of the weights."""
    selections: list[QuerySelection]
    """The counted queries of each call."""
    provisional: bool = False
    """Whether the queries may not count in the end: the last token of a chunk of the prompt."""
    sums: AttentionSums | None = None
    """[L · B, …]; None before they are computed."""
    compute: Callable[[], AttentionSums] | None = None
    """Computes the sums when they are first read; None if they are computed."""
    stored: dict[int, list[StoredRows]] = field(default_factory=dict)
    """By layer: the stored rows of each call, with `keep=True`."""
    verified: bool = False
    """Whether conservation was checked (`conservation.py`)."""

    @property
    def sampled(self) -> bool:
        """Whether the sums are estimates."""
        return any(selection.sampled for selection in self.selections)

    @property
    def count(self) -> Tensor:
        """float64 [B]: the number of counted queries, on the CPU."""
        counts = [selection.count for selection in self.selections]
        return counts[0] if len(counts) == 1 else torch.stack(counts).sum(0)

    def computed(self) -> AttentionSums:
        """The sums, computed now if they were deferred."""
        if self.compute is not None:
            self.sums, self.compute = self.compute(), None
        assert self.sums is not None
        return self.sums

    def merge(self, other: "SumsBlock") -> None:
        """Add a block of the same layers."""
        self.sums = add_sums(self.computed(), other.computed())
        self.selections += other.selections
        self.verified = False
        for layer, rows in other.stored.items():
            self.stored.setdefault(layer, []).extend(rows)

    def exclude(self, sequences: Tensor) -> None:
        """Set the sums of these sequences to 0, bool [B] on the CPU."""
        sums = self.computed()
        device = sums.received.device
        excluded = sequences.repeat(len(self.layers)).to(device)
        for name in (*BY_KEY, *BY_HEAD):
            if (value := getattr(sums, name)) is not None:
                value[excluded] = 0.0
        if sums.max_logit is not None:
            sums.max_logit[excluded] = -torch.inf
        self.selections = [selection.exclude(sequences) for selection in self.selections]
        for layer, stored in self.stored.items():
            self.stored[layer] = [rows.exclude(sequences.to(device)) for rows in stored]

    def of(self, layer: int) -> "SumsBlock":
        """The block of one layer; its tensors are views."""
        sums, L, i = self.computed(), len(self.layers), self.layers.index(layer)
        if L == 1:
            return self
        views: dict[str, Any] = {}
        for each in fields(sums):
            value = getattr(sums, each.name)
            if value is not None:
                views[each.name] = value.view(L, -1, *value.shape[1:])[i]
        return replace(
            self,
            layers=(layer,),
            sums=AttentionSums(**views),
            selections=[*self.selections],
            stored={layer: self.stored[layer]} if layer in self.stored else {},
        )


def join_blocks(blocks: Sequence[SumsBlock], layer: int, keys: int) -> SumsBlock | None:
    """The sums of a layer over all blocks that have it, for this many keys; None if none has."""
    parts = [block.of(layer) for block in blocks if layer in block.layers]
    if not parts:
        return None
    sums = parts[0].computed()
    if len(parts) > 1:
        sums = _map_fields(sums, (*BY_KEY, *BY_HEAD), Tensor.clone)
    for part in parts[1:]:
        sums = add_sums(sums, part.computed())
    if (width := sums.received.shape[-1]) != keys:
        sums = _resize(sums, 0, keys - width)
    selections = [selection for part in parts for selection in part.selections]
    return replace(parts[0], sums=sums, selections=selections)


def add_sums(sums: AttentionSums, more: AttentionSums) -> AttentionSums:
    """Add `more` in place, after a resize if it has more keys."""
    keys, width = more.received.shape[-1], sums.received.shape[-1]
    if keys > width:  # and more, so that a long generation rarely copies
        sums = _resize(sums, 0, max(keys, width + 64, width + width // 4) - width)
    for name in (*BY_KEY, *BY_HEAD):
        value, total = getattr(more, name), getattr(sums, name)
        if value is None:
            continue
        if total is None:
            like = sums.received if name in BY_KEY else sums.entropy
            total = torch.zeros_like(like, dtype=value.dtype)
            setattr(sums, name, total)
        (total[..., :keys] if name in BY_KEY else total).add_(value)
    for name in LARGEST:
        setattr(sums, name, _largest(getattr(sums, name), getattr(more, name)))
    if sums.max_logit is not None:  # unknown if that of one call is
        known = more.max_logit is not None
        sums.max_logit = _largest(sums.max_logit, more.max_logit) if known else None
    if sums.unseen_mass is None or sums.unseen_key is None:
        sums.unseen_mass, sums.unseen_key = more.unseen_mass, more.unseen_key
    elif more.unseen_mass is not None and more.unseen_key is not None:
        worse = more.unseen_mass > sums.unseen_mass
        sums.unseen_key = torch.where(worse, more.unseen_key, sums.unseen_key)
        sums.unseen_mass = torch.maximum(sums.unseen_mass, more.unseen_mass)
    return sums


def sink_weights(sinks: Tensor, lse: Tensor) -> Tensor:
    """float64 [B, H, M]: the attention of each row on learned sinks [H]."""
    return torch.exp(sinks.detach().double()[:, None] - lse.double())


def add_sink(sums: AttentionSums, taken: Tensor, positions: Tensor) -> None:
    """Add the attention on learned sinks [B, H, M] of rows at `positions` [B or 1, M], -1 for a
    row that does not count."""
    where = positions[:, None].to(taken.device)
    taken = taken.double() * (where >= 0)
    sums.sink, sums.sink_position = taken.sum(-1), (taken * where).sum(-1)


def stack_sums(parts: Sequence[AttentionSums]) -> AttentionSums:
    """The sums of several layers, one after the other along the batch."""
    if len(parts) == 1:
        return parts[0]
    stacked: dict[str, Any] = {}
    for each in fields(AttentionSums):
        values = [getattr(part, each.name) for part in parts]
        stacked[each.name] = None if any(value is None for value in values) else torch.cat(values)
    return AttentionSums(**stacked)


def at_position(sums: AttentionSums, first_key: int) -> AttentionSums:
    """Sums by position, if key 0 is at position `first_key`."""
    if first_key:
        sums = _resize(sums, first_key, 0)
        if sums.unseen_key is not None:
            sums.unseen_key = sums.unseen_key + first_key
    sums.lse = None  # as large as all other fields together
    return sums


def _largest(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else torch.maximum(one, other)


def _resize(sums: AttentionSums, left: int, right: int) -> AttentionSums:
    """Sums with more keys on both sides, or with fewer."""
    return _map_fields(sums, BY_KEY, lambda value: pad(value, (left, right)))


def _map_fields(
    sums: AttentionSums, names: Sequence[str], change: Callable[[Tensor], Tensor]
) -> AttentionSums:
    changed: dict[str, Any] = {}
    for name in names:
        value = getattr(sums, name)
        changed[name] = None if value is None else change(value)
    return replace(sums, **changed)
