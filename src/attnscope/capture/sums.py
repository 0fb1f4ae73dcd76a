"""The running sums of a layer over the forward passes of one sequence: prefill and decode steps."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscope.capture.geometry import Geometry, QuerySelection, VisibilityCounts
from attnscope.capture.stored_rows import StoredRows
from attnscope.errors import ScopeError
from attnscope.kernels import AttentionSums

BY_KEY = ("received", "received_later", "variance", "flow")
BY_HEAD = ("mass", "entropy", "self_mass", "entropy_variance")
SUMS = BY_KEY + BY_HEAD


@dataclass(slots=True, eq=False, kw_only=True)
class LayerAccumulator:
    """Sums over the counted queries so far. Keys are positions of the sequence."""

    first_token: Tensor
    """int64 [B], on the CPU: position of the first real token; -1 if there is none yet."""
    all_started: bool = False
    """Whether every sequence has a first token."""
    position: int = 0
    """Number of tokens of the queries' text so far."""
    keys: int = 0
    """Number of keys so far; the buffers may be longer, so that decode steps do not copy them."""
    continued: bool = False
    """Whether the sequence may have several forward passes."""
    turn: int = 0
    """Number of completions started so far."""
    provisional: "LayerAccumulator | None" = None
    """Sums of queries that may not count in the end: the last token of a chunk of the prompt."""
    sums: AttentionSums | None = None
    """None before the first counted query."""
    selections: list[QuerySelection] = field(default_factory=list)
    """The counted queries of each pass."""
    sink: Tensor | None = None
    """float64 [B, H]: attention on learned sinks; None if the layer has none."""
    sink_position: Tensor | None = None
    """float64 [B, H]: the same, times the position of the query."""
    drift: Tensor | None = None
    """[B, H], as in `AttentionSums`; kept for the conservation check."""
    reach: Tensor | None = None
    """[B, H], as in `AttentionSums`."""
    unseen: tuple[Tensor, Tensor] | None = None
    """`unseen_mass` and `unseen_key` of `AttentionSums`, of the call in which the former is
    largest."""
    sampled: bool = False
    top: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """For each call: positions of the queries [B, M], their keys and weights [B, H, M, k]."""
    stored: list[StoredRows] = field(default_factory=list)
    """The stored rows of each call, with `keep=True`."""
    nbytes: int = 0
    """Bytes of the stored rows."""
    deferred: Callable[[], None] | None = None
    """Computes the sums from stored rows and checks them, on first read."""

    def compute_deferred(self) -> None:
        """Compute deferred sums now."""
        deferred, self.deferred = self.deferred, None
        if deferred is not None:
            deferred()

    def check_contiguous(self, geometry: Geometry) -> None:
        """Check that a pass with a KV cache continues the pass before it."""
        if geometry.first_query != self.position:
            raise ScopeError(
                f"this forward pass continues at token {geometry.first_query}, but {self.position} "
                "tokens were measured so far; run the whole sequence inside the with block",
                code="tokens-missing",
                position=geometry.first_query,
                measured=self.position,
            )
        if (
            not geometry.cross
            and geometry.first_key + geometry.keys > geometry.first_query + geometry.queries
        ):
            raise ScopeError(
                "some keys of this model are not tokens of this text (compressed blocks, or keys "
                "of another text), so its decode steps cannot be added up by key; measure one "
                "forward pass over the whole text",
                code="keys-not-tokens",
            )
        if not self.all_started:
            self.first_token = torch.where(
                self.first_token < 0, geometry.first_token, self.first_token
            )
            self.all_started = bool((self.first_token >= 0).all())

    def result(self) -> "LayerAccumulator":
        """The sums over all keys so far, provisional ones included."""
        total = self
        if self.provisional is not None and self.provisional.sums is not None:
            total = replace(
                self,
                provisional=None,
                selections=[*self.selections],
                top=[*self.top],
                stored=[*self.stored],
            )
            if self.sums is not None:
                total.sums = _copy(self.sums)
            total.merge(self.provisional)
        if total.sums is not None and (width := total.sums.received.shape[-1]) < self.keys:
            total.sums = _resize(total.sums, 0, self.keys - width)
        return total

    def commit(self) -> None:
        """Add the provisional sums for good, at the end of the prompt."""
        if self.provisional is not None:
            self.merge(self.provisional)
            self.provisional = None

    def merge(self, other: "LayerAccumulator") -> None:
        """Add the sums of another accumulator."""
        if other.sums is None:
            return
        self.add(other.sums, 0)
        self.update_bounds(other.drift, other.reach)
        self._keep_unseen(other.unseen)
        self.selections += other.selections
        self.sampled |= other.sampled
        self.top += other.top
        self.stored += other.stored
        if other.sink is not None and other.sink_position is not None:
            self._add_sink(other.sink, other.sink_position)

    def zero_sequences(self, sequences: Tensor) -> None:
        """Set the sums of these sequences to 0, bool [B] on the CPU."""
        if self.sums is None:
            return
        dropped = sequences.to(self.sums.received.device)
        for name in SUMS:
            if (sums := getattr(self.sums, name)) is not None:
                sums[dropped] = 0.0
        for taken in (self.sink, self.sink_position):
            if taken is not None:
                taken[dropped] = 0.0
        self.selections = [selection.exclude(sequences) for selection in self.selections]
        self.top = [
            (where.masked_fill(dropped[:, None], -1), keys, weights)
            for where, keys, weights in self.top
        ]
        self.stored = [stored.exclude(dropped) for stored in self.stored]

    @property
    def device(self) -> torch.device:
        """The device of the stored rows."""
        return self.stored[0].positions.device

    def count(self) -> Tensor:
        """float64 [B]: the number of queries, on the CPU."""
        counts = [selection.count for selection in self.selections]
        return counts[0] if len(counts) == 1 else torch.stack(counts).sum(0)

    def add(self, totals: AttentionSums, first_key: int) -> None:
        """Add the sums of some rows; key 0 of these is at position `first_key`."""
        self.update_bounds(totals.lse_error, totals.score_bound)
        if totals.unseen_mass is not None and totals.unseen_key is not None:
            key = totals.unseen_key + first_key if first_key else totals.unseen_key
            self._keep_unseen((totals.unseen_mass, key))
        if self.sums is None:
            if totals.lse is not None:
                totals = replace(totals, lse=None)  # as large as all other fields together
            self.sums = _resize(totals, first_key, 0) if first_key else totals
            return
        keys = first_key + totals.received.shape[-1]
        width = self.sums.received.shape[-1]
        if keys > width:  # and more, so that a long generation rarely copies
            self.sums = _resize(self.sums, 0, max(keys, width + 64, width + width // 4) - width)
        if totals.variance is not None and self.sums.variance is None:
            self.sums = replace(
                self.sums,
                variance=torch.zeros_like(self.sums.received),
                entropy_variance=torch.zeros_like(self.sums.entropy),
            )
        columns = slice(first_key, keys)
        for name in BY_KEY:
            if (more := getattr(totals, name)) is not None:
                getattr(self.sums, name)[..., columns] += more
        for name in BY_HEAD:
            if (more := getattr(totals, name)) is not None:
                getattr(self.sums, name).add_(more)

    def update_bounds(self, drift: Tensor | None, reach: Tensor | None = None) -> None:
        """Keep the largest `drift` and `reach` of all calls."""
        if drift is not None:
            self.drift = drift if self.drift is None else torch.maximum(self.drift, drift)
        if reach is not None:
            self.reach = reach if self.reach is None else torch.maximum(self.reach, reach)

    def _keep_unseen(self, unseen: tuple[Tensor, Tensor] | None) -> None:
        """Keep the larger mass of a key that no row sees, and that key."""
        if self.unseen is None or unseen is None:
            self.unseen = self.unseen or unseen
            return
        (mass, key), (more, other) = self.unseen, unseen
        self.unseen = torch.maximum(mass, more), torch.where(more > mass, other, key)

    def add_sink(self, taken: Tensor, selection: QuerySelection) -> None:
        """Add the attention of each row on learned sinks, [B, H, M]."""
        counted = selection.gather_rows(selection.counted_queries())[:, None].to(taken.device)
        positions = selection.geometry.positions().expand(taken.shape[0], -1)
        where = selection.gather_rows(positions)[:, None].to(taken.device)
        taken = taken.double() * counted
        self._add_sink(taken.sum(-1), (taken * where).sum(-1))

    def _add_sink(self, total: Tensor, placed: Tensor) -> None:
        self.sink = total if self.sink is None else self.sink + total
        old = self.sink_position
        self.sink_position = placed if old is None else old + placed


@dataclass(slots=True, eq=False, kw_only=True)
class StackedSums:
    """Sums of several layers, stacked along the batch.

    They are split lazily: the views of 30 layers take 0.4 ms, and often no layer is read.
    """

    layers: list[int]
    sums: AttentionSums
    """[L · B, …], stacked by layer."""
    selection: QuerySelection
    turn: int
    continued: bool
    provisional: bool
    """As in `LayerAccumulator`."""

    def split_layers(self) -> dict[int, LayerAccumulator]:
        """The sums of each layer."""
        geometry = self.selection.geometry
        accumulators = {}
        for layer, sums in zip(self.layers, split(self.sums, len(self.layers)), strict=True):
            totals = accumulators[layer] = LayerAccumulator(
                first_token=geometry.first_token,
                all_started=geometry.all_started,
                position=geometry.first_query + geometry.queries,
                keys=geometry.first_key + geometry.keys,
                continued=self.continued,
                turn=self.turn,
            )
            if self.provisional:
                totals.provisional = totals = LayerAccumulator(first_token=geometry.first_token)
            totals.add(sums, geometry.first_key)
            totals.selections.append(self.selection)
        return accumulators


def unstack(tensor: Tensor, n: int) -> tuple[Tensor, ...]:
    """Split [n · B, …] into n tensors [B, …]."""
    return tensor.view(n, tensor.shape[0] // n, *tensor.shape[1:]).unbind(0)


def split(sums: AttentionSums, n: int) -> list[AttentionSums]:
    """Split the sums of `n` stacked batches."""
    if n == 1:
        return [sums]
    parts: dict[str, Any] = {}
    for each in fields(sums):
        value = getattr(sums, each.name)
        if value is not None and each.name != "lse":
            parts[each.name] = unstack(value, n)
    return [AttentionSums(**{name: value[i] for name, value in parts.items()}) for i in range(n)]


def join_visibility_counts(selections: list[QuerySelection], keys: int) -> VisibilityCounts:
    """The visibility counts of several passes, added up over this many keys."""

    def total(name: str) -> Tensor:
        first_token: Tensor = getattr(selections[0].visibility_counts, name)
        sums = torch.zeros(first_token.shape[0], keys, dtype=first_token.dtype)
        for selection in selections:
            value = getattr(selection.visibility_counts, name)
            at = selection.geometry.first_key
            sums[:, at : at + value.shape[1]] += value
        return sums

    return VisibilityCounts(
        position=torch.stack([s.visibility_counts.position for s in selections]).sum(0),
        eligible=total("eligible"),
        eligible_later=total("eligible_later"),
        uniform=total("uniform"),
        uniform_later=total("uniform_later"),
        groups=torch.stack([s.visibility_counts.groups for s in selections]).sum(0),
    )


def _copy(sums: AttentionSums) -> AttentionSums:
    copies: dict[str, Any] = {}
    for name in SUMS:
        value: Tensor | None = getattr(sums, name)
        copies[name] = None if value is None else value.clone()
    return replace(sums, **copies)


def _resize(sums: AttentionSums, left: int, right: int) -> AttentionSums:
    def grow(tensor: Tensor) -> Tensor:
        return pad(tensor, (left, right))

    return replace(
        sums,
        received=grow(sums.received),
        received_later=grow(sums.received_later),
        variance=None if sums.variance is None else grow(sums.variance),
        flow=None if sums.flow is None else grow(sums.flow),
    )
