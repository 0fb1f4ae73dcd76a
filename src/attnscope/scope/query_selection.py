"""The counted rows of a call: which queries count, and the kernel input for them.

A `QuerySelection` adds the choice of queries to a `Geometry`. All layers with the same mask share
it. Its `RowBlock`s become the `KernelRows` of a call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from attnscope.errors import ScopeError, wrong_shape
from attnscope.interception.generation import CompletionSpan
from attnscope.interception.geometry import Geometry
from attnscope.kernels import RowBlock
from attnscope.scope.queries import NEAR, Queries, counted_queries, draw


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
        return self.all_rows.take(of_queries, 1)

    def positions(self) -> Tensor:
        """int64 [B, M]: positions of the rows in the sequence, -1 for rows that do not count."""
        where = self.geometry.positions().expand(self.geometry.batch, -1)
        return self.gather_rows(where.where(self.counted_queries(), -1))

    def visibility(self) -> Tensor:
        """bool [B, 1 or H, M, K]: what the counted rows of `all_rows` see, spelled out."""
        counted = self.counted_queries()[:, None, :, None].to(self.geometry.device)
        return self.all_rows.take(self.geometry.visibility() & counted, 2)

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


def join_visibility_counts(selections: Sequence[QuerySelection], keys: int) -> VisibilityCounts:
    """The visibility counts of several passes, added up over this many keys."""

    def total(name: str) -> Tensor:
        values: list[Tensor] = [getattr(each.visibility_counts, name) for each in selections]
        if name in ("position", "groups"):
            return torch.stack(values).sum(0)
        sums = values[0].new_zeros(len(values[0]), keys)
        for selection, value in zip(selections, values, strict=True):
            at = selection.geometry.first_key
            sums[:, at : at + value.shape[1]] += value
        return sums

    return VisibilityCounts(**{each.name: total(each.name) for each in fields(VisibilityCounts)})


def select(
    queries: Queries, geometry: Geometry, span: CompletionSpan, classes: Tensor | None, groups: int
) -> QuerySelection | None:
    """The rows of this pass that count; None where there are none."""
    counted = group = None
    row = min(span.start - geometry.first_query, geometry.queries) - 1
    quick = queries.name == "last" and classes is None and span.end is None
    if quick and row >= 0 and geometry.real_queries is None and geometry.form != "interval":
        counted = torch.zeros(geometry.batch, geometry.queries, dtype=torch.bool)
        counted[:, row] = True
        all_rows = _one_row(geometry, row)
    else:
        if queries.name != "all" or geometry.real_queries is not None or span.call is not None:
            counted = counted_queries(queries, geometry, span)
        if counted is not None and not bool(counted.any()):
            return None
        group = None if classes is None else _classes(geometry, classes)
        all_rows = _all_rows(geometry, counted, group)
    count = torch.full((geometry.batch,), float(geometry.queries), dtype=torch.float64)
    if counted is not None:
        count = counted.sum(1).double()
    blocks: tuple[RowBlock, ...] = (all_rows,)
    # A sample must be much cheaper than all queries; otherwise all are measured.
    enough = geometry.queries > max(4 * queries.sample, 2 * NEAR)
    if queries.name == "sample" and enough and int(count.min()) >= queries.sample:
        blocks = _sampled_blocks(queries, geometry, counted, group)
    return QuerySelection(
        geometry=geometry,
        all_rows=all_rows,
        blocks=blocks,
        count=count,
        counted=counted,
        group=group,
        groups=groups,
    )


def _one_row(geometry: Geometry, row: int) -> RowBlock:
    """The same row of every sequence, without padding; most often nothing goes to the device."""
    self_key = row + geometry.first_query - geometry.first_key
    stop = row + 1 if geometry.form == "causal" else geometry.keys
    if stop == self_key + 1 and not geometry.cross:
        return RowBlock(single_row=row, causal=True, diagonal_offset=self_key)
    numbers = [0, stop, geometry.keys if geometry.cross else self_key]
    bounds = torch.tensor(numbers, dtype=torch.int32).to(geometry.device, non_blocking=True)
    start, stop, where = (bound.repeat(geometry.batch, 1) for bound in bounds)
    return RowBlock(single_row=row, start=start, stop=stop, self_key=where)


def _classes(geometry: Geometry, classes: Tensor) -> Tensor:
    """int64 [B, Q]: the class of each query, -1 beyond the classes given."""
    if classes.shape[0] != geometry.batch:
        raise wrong_shape("classes", f"[{geometry.batch}, keys] as this forward pass", classes)
    group = torch.full((geometry.batch, geometry.queries), -1, dtype=torch.int64)
    known = min(max(classes.shape[1] - geometry.first_query, 0), geometry.queries)
    group[:, :known] = classes[:, geometry.first_query : geometry.first_query + known]
    return group


def _all_rows(geometry: Geometry, counted: Tensor | None, group: Tensor | None) -> RowBlock:
    """All counted rows; gathered if few count, so that the cost depends on their number."""
    if counted is None and geometry.form == "causal":
        moved = None if group is None else group.to(geometry.device)
        return RowBlock(causal=True, group=moved)
    most = geometry.queries if counted is None else int(counted.sum(1).max())
    if counted is None or 2 * most > geometry.queries:
        return _row_block(geometry, None, counted, group)
    # The counted rows of each sequence; shorter ones are filled with rows that do not count.
    index = torch.topk(counted.int(), most, dim=1).indices.sort(1).values
    return _row_block(geometry, index, counted, group)


def _row_block(
    geometry: Geometry,
    index: Tensor | None,
    counted: Tensor | None,
    group: Tensor | None,
    *,
    low: Tensor | None = None,
    high: Tensor | None = None,
    weight: Tensor | None = None,
    fpc: Tensor | None = None,
) -> RowBlock:
    """Rows on the device. `low` and `high` [Q] narrow the visible range of each row."""
    self_key = geometry.self_keys().expand(geometry.batch, -1)

    def rows(tensor: Tensor) -> Tensor:
        return tensor if index is None else tensor.gather(1, index)

    start, stop = (rows(bound) for bound in geometry.visible_ranges)
    if low is not None:
        start = torch.maximum(start, rows(low.expand_as(self_key)).clamp(max=geometry.keys))
    if high is not None:
        stop = torch.minimum(stop, rows(high.expand_as(self_key)))
    if counted is not None:
        stop = torch.where(rows(counted), stop, 0)
    stop = torch.maximum(stop, start)
    device = geometry.device
    single_row = None
    if index is not None and index.shape[1] == 1 and bool((index == index[0]).all()):
        single_row = int(index[0])
    return RowBlock(
        partial=low is not None or high is not None,
        single_row=single_row,
        index=None if index is None else index.to(device, non_blocking=True),
        start=start.int().to(device, non_blocking=True),
        stop=stop.int().to(device, non_blocking=True),
        self_key=rows(self_key).int().contiguous().to(device, non_blocking=True),
        weight=None if weight is None else weight.float().to(device, non_blocking=True),
        fpc=None if fpc is None else fpc.float().to(device, non_blocking=True),
        group=None if group is None else rows(group).to(device, non_blocking=True),
    )


def _sampled_blocks(
    queries: Queries, geometry: Geometry, counted: Tensor | None, group: Tensor | None
) -> tuple[RowBlock, ...]:
    """Near keys for every query; far keys, on both sides, for the drawn queries."""
    index, weight, fpc = draw(queries.sample, queries.seed, geometry, counted)
    self_key = geometry.self_keys()
    first, stop = self_key - NEAR + 1, self_key + NEAR
    drawn = {"weight": weight, "fpc": fpc}
    blocks = [
        _row_block(geometry, None, counted, group, low=first, high=stop),
        _row_block(geometry, index, None, group, high=first, **drawn),
    ]
    if geometry.form != "causal":
        blocks.append(_row_block(geometry, index, None, group, low=stop, **drawn))
    return tuple(blocks)
