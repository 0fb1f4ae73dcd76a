"""Parses the argument `queries` and selects the rows of a call that count.


"all" · "last" · "generated" · "predicts" · "sample:K" · a bool tensor [batch, keys].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnscope.capture.generation import CompletionSpan
from attnscope.capture.geometry import Geometry, QuerySelection, RowBlock
from attnscope.errors import InputError, describe
from attnscope.spec.queries import IN_A_WATCH, parse_queries

# Sampling: attention is strongest close to the diagonal and hardest to sample there, so keys less
# than this far from a query are counted exactly for every query, and only farther ones sampled.
NEAR = 256


@dataclass(frozen=True, eq=False)
class Queries:
    """The user's choice of queries."""

    name: str
    """"all", "last", "generated", "predicts", "sample" or "mask"."""
    mask: Tensor | None = None
    """bool [batch, keys] on the CPU."""
    sample: int = 0
    seed: int = 0

    def __str__(self) -> str:
        return f"sample:{self.sample}" if self.name == "sample" else self.name

    def counts_no_query(self, geometry: Geometry, span: CompletionSpan) -> bool:
        """Whether certainly no query of this pass counts; a quick check."""
        if self.mask is not None:
            return geometry.first_query >= self.mask.shape[1]
        if self.name == "last":
            return geometry.first_query >= span.start
        return self.name == "generated" and geometry.first_query + geometry.queries <= span.start

    def provisional(self, geometry: Geometry, span: CompletionSpan) -> bool:
        """Whether these queries may not count in the end.

        With chunked prefill the last prompt token is known when the prompt is complete.
        """
        only_prompt = geometry.first_query + geometry.queries <= span.start
        return self.name in ("last", "predicts") and only_prompt


def parse(queries: object, seed: int) -> Queries:
    """Check the argument before the forward pass."""
    if isinstance(queries, Tensor):
        if queries.dtype != torch.bool or queries.ndim != 2:
            raise InputError(
                f"a query mask must be a bool tensor [batch, keys]; got {describe(queries)}",
                code="wrong-shape",
                argument="queries",
                got=describe(queries),
            )
        return Queries("mask", mask=queries.detach().cpu())
    try:
        parsed = parse_queries(queries, IN_A_WATCH)
    except InputError as error:
        raise InputError(
            f"{error}, or a bool tensor [batch, keys]", code=error.code, **error.values
        ) from None
    return Queries(parsed.kind, sample=parsed.sample, seed=seed)


def select(
    queries: Queries, geometry: Geometry, span: CompletionSpan, classes: Tensor | None, groups: int
) -> QuerySelection | None:
    """The rows of this pass that count; None where there are none."""
    if queries.name == "last" and classes is None and span.end is None:
        row = min(span.start - geometry.first_query, geometry.queries) - 1
        if row >= 0 and geometry.real_queries is None and geometry.form != "interval":
            return _one_row(geometry, row)
    counted = None
    if queries.name != "all" or geometry.real_queries is not None or span.call is not None:
        counted = counted_queries(queries, geometry, span)
    if counted is not None and not bool(counted.any()):
        return None
    count = torch.full((geometry.batch,), float(geometry.queries), dtype=torch.float64)
    if counted is not None:
        count = counted.sum(1).double()
    group = None if classes is None else _classes(geometry, classes)
    all_rows = _all_rows(geometry, counted, count, group)
    blocks: tuple[RowBlock, ...] = (all_rows,)
    # A sample must be much cheaper than all queries; otherwise all are measured.
    enough = geometry.queries > max(4 * queries.sample, 2 * NEAR)
    if queries.name == "sample" and enough and int(count.min()) >= queries.sample:
        blocks = _sample(queries, geometry, counted, group)
    return QuerySelection(
        geometry=geometry,
        all_rows=all_rows,
        blocks=blocks,
        count=count,
        counted=counted,
        group=group,
        groups=groups,
    )


def _one_row(geometry: Geometry, row: int) -> QuerySelection:
    """The same row of every sequence, without padding."""
    B, self_key = geometry.batch, row + geometry.first_query - geometry.first_key
    counted = torch.zeros(B, geometry.queries, dtype=torch.bool)
    counted[:, row] = True
    stop = row + 1 if geometry.form == "causal" else geometry.keys
    if stop == self_key + 1 and not geometry.cross:  # nothing has to be sent to the device
        all_rows = RowBlock(rows=1, single_row=row, causal=True, shift=self_key)
    else:
        bounds = torch.tensor(
            [0, stop, geometry.keys if geometry.cross else self_key], dtype=torch.int32
        )
        bounds = bounds.to(geometry.device, non_blocking=True)
        start, stop, where = (bound.repeat(B, 1) for bound in bounds)
        all_rows = RowBlock(rows=1, single_row=row, start=start, stop=stop, self_key=where)
    return QuerySelection(
        geometry=geometry,
        all_rows=all_rows,
        blocks=(all_rows,),
        count=torch.ones(B, dtype=torch.float64),
        counted=counted,
        group=None,
        groups=0,
    )


def counted_queries(queries: Queries, geometry: Geometry, span: CompletionSpan) -> Tensor | None:
    """bool [B, Q] on the CPU: the counted queries, without padding; None if all count."""
    positions, real = geometry.positions(), geometry.real_queries
    if span.end is not None and int(span.end.min()) < geometry.first_query + geometry.queries:
        not_ended = positions < span.end[:, None]
        real = not_ended if real is None else real & not_ended
    if queries.name in ("all", "sample"):
        return real
    shape = (geometry.batch, geometry.queries)
    generated = (positions >= span.start).expand(shape)
    if queries.name == "mask":
        selected = _masked(queries.mask, geometry)
    elif queries.name == "generated":
        selected = generated
    else:
        prompt = ~generated if real is None else ~generated & real
        selected = _last(prompt) if span.last is None else positions == span.last[:, None]
        selected = selected.expand(shape)
        if queries.name == "predicts":
            selected = selected | generated
    return selected if real is None else selected & real


def _last(which: Tensor) -> Tensor:
    """bool [B, Q]: the last of these queries of each sequence; none where it has none."""
    order = torch.arange(which.shape[1])
    return which & (order == torch.where(which, order, -1).amax(1, keepdim=True))


def _masked(mask: Tensor | None, geometry: Geometry) -> Tensor:
    assert mask is not None
    B, Q = geometry.batch, geometry.queries
    if mask.shape[0] != B or (geometry.first_query == 0 and mask.shape[1] < Q):
        raise InputError(
            f"the query mask has shape {list(mask.shape)}; this forward pass has "
            f"batch {B} and {Q} tokens, so it must be [{B}, {Q}]",
            code="wrong-shape",
            argument="queries",
            got=list(mask.shape),
        )
    selected = torch.zeros(B, Q, dtype=torch.bool)
    known = min(max(mask.shape[1] - geometry.first_query, 0), Q)
    selected[:, :known] = mask[:, geometry.first_query : geometry.first_query + known]
    return selected


def _classes(geometry: Geometry, classes: Tensor) -> Tensor:
    """int64 [B, Q]: the class of each query, -1 beyond the classes given."""
    if classes.shape[0] != geometry.batch:
        raise InputError(
            f"classes has {classes.shape[0]} rows, and the batch has {geometry.batch} sequences; "
            "it must be [batch, keys]",
            code="wrong-shape",
            argument="classes",
            got=list(classes.shape),
        )
    group = torch.full((geometry.batch, geometry.queries), -1, dtype=torch.int64)
    known = min(max(classes.shape[1] - geometry.first_query, 0), geometry.queries)
    group[:, :known] = classes[:, geometry.first_query : geometry.first_query + known]
    return group


def _all_rows(
    geometry: Geometry, counted: Tensor | None, count: Tensor, group: Tensor | None
) -> RowBlock:
    """All counted rows; gathered if few count, so that the cost depends on their number."""
    if counted is None and geometry.form == "causal":
        moved = None if group is None else group.to(geometry.device)
        return RowBlock(rows=geometry.queries, causal=True, group=moved)
    most = int(count.max())
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
    shrink: Tensor | None = None,
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
        rows=start.shape[1],
        single_row=single_row,
        index=None if index is None else index.to(device, non_blocking=True),
        start=start.int().to(device, non_blocking=True),
        stop=stop.int().to(device, non_blocking=True),
        self_key=rows(self_key).int().contiguous().to(device, non_blocking=True),
        weight=None if weight is None else weight.float().to(device, non_blocking=True),
        shrink=None if shrink is None else shrink.float().to(device, non_blocking=True),
        group=None if group is None else rows(group).to(device, non_blocking=True),
    )


def _sample(
    queries: Queries, geometry: Geometry, counted: Tensor | None, group: Tensor | None
) -> tuple[RowBlock, ...]:
    """Near keys for every query; far keys for two draws from each of K / 2 strata of positions."""
    B, strata = geometry.batch, queries.sample // 2
    generator = torch.Generator().manual_seed(queries.seed + geometry.first_query)
    index = torch.empty(B, 2 * strata, dtype=torch.int64)
    sizes = torch.empty(B, strata, dtype=torch.float64)
    for b in range(B):
        rows = torch.arange(geometry.queries) if counted is None else counted[b].nonzero()[:, 0]
        edges = torch.linspace(0, len(rows), strata + 1, dtype=torch.float64).round().long()
        size = edges.diff()
        first = (torch.rand(strata, generator=generator) * size).long().clamp(max=size - 1)
        other = (torch.rand(strata, generator=generator) * (size - 1)).long()
        other = (other.clamp(max=size - 2) + 1 + first) % size
        index[b] = rows[torch.stack([edges[:-1] + first, edges[:-1] + other], 1).flatten()]
        sizes[b] = size
    self_key = geometry.self_keys()
    weight, shrink = (sizes / 2).repeat_interleave(2, 1), 1 - 2 / sizes
    near = _row_block(geometry, None, counted, group, low=self_key - NEAR + 1, high=self_key + NEAR)
    blocks = [
        _row_block(
            geometry, index, None, group, high=self_key - NEAR + 1, weight=weight, shrink=shrink
        ),
    ]
    if geometry.form != "causal":
        blocks.append(
            _row_block(
                geometry, index, None, group, low=self_key + NEAR, weight=weight, shrink=shrink
            )
        )
    return (near, *blocks)
