"""Which keys each query of a call sees, and which queries count.

A `Geometry` describes the mask of a call; a `QuerySelection` adds the choice of queries. All layers
with the same mask share them. They compute their values on the CPU when first needed.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscope.errors import ScopeError
from attnscope.kernels.call import Form, VisibleRanges


@dataclass(eq=False, kw_only=True)
class Geometry:
    """The geometry of one attention call: positions, padding and visible ranges of keys."""

    batch: int
    queries: int
    keys: int
    first_query: int
    """Position of query 0 in the sequence (more than 0 with a cache)."""
    first_key: int
    """Position of key 0 in the sequence (more than 0 when a windowed cache has dropped some)."""
    device: torch.device
    form: Form
    bounds: tuple[Tensor, Tensor] | None = None
    """Start and stop of the visible range of each query, int64 [B, Q] on the CPU; None if `form`
    defines them."""
    real_queries: Tensor | None = None
    """bool [B, Q] on the CPU; None where no query is padding."""
    real_keys: Tensor | None = None
    """bool [B, K] on the CPU; None if no visible range contains padding."""
    gap_mask: Tensor | None = None
    """bool [B or 1, H or 1, Q, K] on the model's device, if the visible keys of a query
    are not one range. Only the dense fallback measures such attention."""
    cross: bool = False
    """Whether this is cross-attention, where no key is the token of a query."""
    selections: dict[Any, "QuerySelection | None"] = field(default_factory=dict)
    """Memo of selections, by choice of queries."""
    copies: dict[Any, "Geometry"] = field(default_factory=dict)
    """Memo of this geometry on other devices, and as cross-attention."""

    @cached_property
    def visible_ranges(self) -> tuple[Tensor, Tensor]:
        """Start and stop, int64 [B, Q] on the CPU."""
        if self.bounds is not None:
            return self.bounds
        shape = (self.batch, self.queries)
        stop = torch.full(shape, self.keys)
        if self.form == "causal":
            stop = torch.arange(1, self.queries + 1).expand(shape)
        return torch.zeros(shape, dtype=torch.int64), stop

    @cached_property
    def visible(self) -> VisibleRanges:
        """The visible ranges for the kernels, on the device of the model."""

        def bounds() -> tuple[Tensor, Tensor]:
            start, stop = self.visible_ranges
            return start.int().to(self.device, non_blocking=True), stop.int().to(
                self.device, non_blocking=True
            )

        real = None if self.real_keys is None else self.real_keys.to(self.device, non_blocking=True)
        return VisibleRanges(form=self.form, bounds=bounds, real=real)

    def on(self, device: torch.device) -> "Geometry":
        """This geometry on the given device."""
        if device == self.device:
            return self
        if device not in self.copies:
            gap_mask = None if self.gap_mask is None else self.gap_mask.to(device)
            self.copies[device] = self._changed(device=device, gap_mask=gap_mask)
        return self.copies[device]

    def visibility(self) -> Tensor:
        """bool [B, 1 or H, Q, K]: the dense mask V, for the fallback."""
        start, stop = self.visible_ranges
        order = torch.arange(self.keys)
        visible = (order >= start[..., None]) & (order < stop[..., None])
        if self.real_keys is not None:
            visible &= self.real_keys[:, None]
        visible = visible[:, None].to(self.device)
        return visible if self.gap_mask is None else visible & self.gap_mask

    def with_gaps(self, gap_mask: Tensor) -> "Geometry":
        """This geometry with a mask whose rows are not ranges."""
        return self._changed(form="interval", bounds=self.visible_ranges, gap_mask=gap_mask)

    def as_cross(self, past: int, padding: Tensor | None) -> "Geometry":
        """This geometry for queries of another text, which has `past` tokens before them.

        `padding` is the attention mask of that text, [B, tokens], 0 at padding.
        """
        real = None if padding is None else padding[:, past : past + self.queries].bool().cpu()
        if real is not None and (real.shape != (self.batch, self.queries) or bool(real.all())):
            real = None
        key = "across", past
        if key not in self.copies:
            self.copies[key] = self._changed(first_query=past, real_queries=real, cross=True)
        return self.copies[key]

    def _changed(self, **fields: Any) -> "Geometry":
        """A changed copy without the memos."""
        return replace(self, selections={}, copies={}, **fields)

    def clear_caches(self) -> None:
        """Clear the tensors that kernels share between layers, after the pass."""
        if "visible" in vars(self):
            self.visible.cache.clear()
        for selection in self.selections.values():
            for block in (selection.all_rows, *selection.blocks) if selection is not None else ():
                block.cache.clear()

    def self_keys(self) -> Tensor:
        """int64 [Q]: index of each query's own key; the number of keys if it has none."""
        if self.cross:
            return torch.full((self.queries,), self.keys)
        return torch.arange(self.queries) + (self.first_query - self.first_key)

    def positions(self) -> Tensor:
        """int64 [Q]: positions of the queries in the sequence."""
        return torch.arange(self.queries) + self.first_query

    @cached_property
    def first_token(self) -> Tensor:
        """int64 [B]: position of the first key that is not padding; -1 if this pass has none."""
        if self.cross:
            return self.visible_ranges[0].amin(1)
        if self.real_queries is None:
            return torch.full((self.batch,), self.first_query)
        first = self.real_queries.int().argmax(1) + self.first_query
        return torch.where(self.real_queries.any(1), first, -1)

    @cached_property
    def all_started(self) -> bool:
        """Whether every sequence has a first token."""
        return (self.real_queries is None and not self.cross) or bool((self.first_token >= 0).all())

    def __getstate__(self) -> dict[str, Any]:
        """The fields without the memos."""
        kept = {name: value for name, value in vars(self).items() if name != "visible"}
        return kept | {"selections": {}, "copies": {}}

    def n_visible(self) -> Tensor:
        """int64 [B, Q]: number of keys each query sees."""
        start, stop = self.visible_ranges
        if self.real_keys is None:
            return stop - start
        real_before = pad(self.real_keys.long().cumsum(1), (1, 0))
        return real_before.gather(1, stop) - real_before.gather(1, start)


def concat(geometries: list[Geometry]) -> Geometry:
    """One geometry for successive passes, over the keys of all of them."""
    first, last = geometries[0], geometries[-1]
    if len(geometries) == 1:
        return first
    keys = last.first_key + last.keys - first.first_key
    starts, stops, real_queries = [], [], []
    real = torch.ones(first.batch, keys, dtype=torch.bool)
    for geometry in geometries:
        at = geometry.first_key - first.first_key
        start, stop = geometry.visible_ranges
        starts.append(start + at)
        stops.append(stop + at)
        shape = geometry.batch, geometry.queries
        real_queries.append(
            torch.ones(shape).bool() if geometry.real_queries is None else geometry.real_queries
        )
        if geometry.real_keys is not None:
            real[:, at : at + geometry.keys] = geometry.real_keys
    padded = any(geometry.real_queries is not None for geometry in geometries)
    holes = any(geometry.real_keys is not None for geometry in geometries)
    return first._changed(
        queries=sum(geometry.queries for geometry in geometries),
        keys=keys,
        form="interval",
        bounds=(torch.cat(starts, 1), torch.cat(stops, 1)),
        real_queries=torch.cat(real_queries, 1) if padded else None,
        real_keys=real if holes else None,
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowBlock:
    """The rows of one kernel call, on the device: all queries in order (`index` is None), or some.

    The fields are those of `KernelRows`.
    """

    rows: int
    index: Tensor | None = None
    """int64 [B, M]: the queries."""
    single_row: int | None = None
    """The query, if the rows are the same single query of every sequence."""
    causal: bool = False
    shift: int = 0
    start: Tensor | None = None
    stop: Tensor | None = None
    self_key: Tensor | None = None
    weight: Tensor | None = None
    shrink: Tensor | None = None
    group: Tensor | None = None
    cache: dict[Any, Any] = field(default_factory=dict)

    def repeat(self, n: int) -> "RowBlock":
        """The same rows for a batch that is stacked `n` times."""
        if n == 1:
            return self
        if ("repeat", n) not in self.cache:
            each: dict[str, Any] = {
                name: None if (value := getattr(self, name)) is None else value.repeat(n, 1)
                for name in ("index", "start", "stop", "self_key", "weight", "shrink", "group")
            }
            self.cache["repeat", n] = replace(self, cache={}, **each)
        repeated: RowBlock = self.cache["repeat", n]
        return repeated


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class VisibilityCounts:
    """Counts that follow from the mask and the counted queries alone. On the CPU."""

    position: Tensor
    """float64 [B]: the sum of their positions."""
    eligible: Tensor
    """float64 [B, keys]: counted queries that see the key."""
    eligible_later: Tensor
    """float64 [B, keys]: those of them after the key."""
    uniform: Tensor
    """float64 [B, keys]: what the key would receive under uniform attention."""
    uniform_later: Tensor
    """float64 [B, keys]: the part of it from queries after the key."""
    groups: Tensor
    """float64 [B, classes]: counted queries per class; no classes, no columns."""


@dataclass(eq=False, kw_only=True)
class QuerySelection:
    """The rows to reduce in one pass."""

    geometry: Geometry
    all_rows: RowBlock
    """Every counted row over all it sees."""
    blocks: tuple[RowBlock, ...]
    """Blocks whose sums add up to those of `all_rows`: that alone, unless far keys are sampled."""
    count: Tensor
    """float64 [B]: the number of queries, |Q|."""
    counted: Tensor | None
    """bool [B, Q] on the CPU: the counted queries; None if all count."""
    group: Tensor | None
    """int64 [B, Q] on the CPU: the class of each query; None without classes."""
    groups: int

    @property
    def sampled(self) -> bool:
        """Whether the totals are estimates."""
        return self.blocks[0] is not self.all_rows

    def exclude(self, sequences: Tensor) -> "QuerySelection":
        """The selection without the queries of some sequences, bool [B]."""
        counted = self.counted_queries() & ~sequences[:, None]
        return replace(self, counted=counted, count=counted.sum(1).double())

    def gather_rows(self, of_queries: Tensor) -> Tensor:
        """What there is for every query [B, Q], for the rows of `all_rows` [B, M]."""
        if self.all_rows.single_row is not None:
            return of_queries[:, self.all_rows.single_row : self.all_rows.single_row + 1]
        if self.all_rows.index is None:
            return of_queries
        return of_queries.gather(1, self.all_rows.index.to(of_queries.device))

    def visibility(self) -> Tensor:
        """bool [B, 1 or H, M, K]: what the counted rows of `all_rows` see, spelled out."""
        visible = self.geometry.visibility() & self.counted_queries()[:, None, :, None].to(
            self.geometry.device
        )
        if self.all_rows.single_row is not None:
            return visible[:, :, self.all_rows.single_row : self.all_rows.single_row + 1]
        if self.all_rows.index is None:
            return visible
        index = self.all_rows.index.to(visible.device)[:, None, :, None]
        return visible.gather(2, index.expand(-1, visible.shape[1], -1, visible.shape[3]))

    def counted_queries(self) -> Tensor:
        """bool [B, Q]: the counted queries."""
        if self.counted is not None:
            return self.counted
        return torch.ones(self.geometry.batch, self.geometry.queries, dtype=torch.bool)

    @cached_property
    def visibility_counts(self) -> VisibilityCounts:
        """How many counted queries see each key, and its mass under uniform attention."""
        geometry, counted = self.geometry, self.counted_queries()
        groups = torch.zeros(geometry.batch, self.groups, dtype=torch.float64)
        if self.group is not None:
            member = self.group[..., None] == torch.arange(self.groups)
            groups = (member & counted[..., None]).sum(1).double()
        position = (geometry.positions() * counted).sum(1).double()
        columns = (
            self._by_ranges(counted) if geometry.gap_mask is None else self._by_matrix(counted)
        )
        return VisibilityCounts(
            position=position * torch.nan if geometry.cross else position, groups=groups, **columns
        )

    def _by_ranges(self, counted: Tensor) -> dict[str, Tensor]:
        """Counts by key, from the starts and stops of visible ranges."""
        geometry = self.geometry
        start, stop = geometry.visible_ranges
        before_self = torch.maximum(torch.minimum(stop, geometry.self_keys()), start)
        n_visible = geometry.n_visible()
        one = (counted & (n_visible > 0)).double()

        def scatter_ranges(weight: Tensor, end: Tensor) -> Tensor:
            ends = torch.zeros(geometry.batch, geometry.keys + 1, dtype=torch.float64)
            ends.scatter_add_(1, start, weight).scatter_add_(1, end, -weight)
            total = ends.cumsum(1)[:, : geometry.keys]
            return total if geometry.real_keys is None else total * geometry.real_keys

        share = one / n_visible.clamp(min=1)
        return {
            "eligible": scatter_ranges(one, stop).round(),
            "eligible_later": scatter_ranges(one, before_self).round(),
            "uniform": scatter_ranges(share, stop),
            "uniform_later": scatter_ranges(share, before_self),
        }

    def _by_matrix(self, counted: Tensor) -> dict[str, Tensor]:
        """Counts by key, from a dense mask."""
        geometry = self.geometry
        visible = geometry.visibility().cpu() & counted[:, None, :, None]
        if visible.shape[1] > 1:
            raise ScopeError(
                "the heads of this model have different masks, so results that depend on which "
                "queries see a key (average, eligible, uniform, lift) are not defined; received is",
                code="masks-by-head",
            )
        one = visible[:, 0].double()
        share = one / one.sum(-1, keepdim=True).clamp(min=1)
        later = torch.arange(geometry.keys) < geometry.self_keys()[:, None]
        return {
            "eligible": one.sum(1),
            "eligible_later": (one * later).sum(1),
            "uniform": share.sum(1),
            "uniform_later": (share * later).sum(1),
        }
