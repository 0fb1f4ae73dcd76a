"""Which queries count: parsing the `queries` argument, and choosing rows in a frame.

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
    """A choice of queries, as the user made it."""

    name: str
    """"all", "last", "generated", "predicts", "sample" or "mask"."""
    mask: Tensor | None = None
    """bool [batch, keys] on the CPU."""
    sample: int = 0
    seed: int = 0

    def __str__(self) -> str:
        return f"sample:{self.sample}" if self.name == "sample" else self.name

    def counts_none(self, frame: Geometry, reply: CompletionSpan) -> bool:
        """Whether no query of this pass can count, as is plain without looking closer."""
        if self.mask is not None:
            return frame.first_query >= self.mask.shape[1]
        if self.name == "last":
            return frame.first_query >= reply.start
        return self.name == "generated" and frame.first_query + frame.queries <= reply.start

    def tentative(self, frame: Geometry, reply: CompletionSpan) -> bool:
        """Whether a later pass of the same prompt may show that these queries do not count: its
        last token is known once the prompt is over."""
        only_prompt = frame.first_query + frame.queries <= reply.start
        return self.name in ("last", "predicts") and only_prompt


def parse(queries: object, seed: int) -> Queries:
    """Check the argument early, so that a typing error does not cost a forward pass."""
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
        asked = parse_queries(queries, IN_A_WATCH)
    except InputError as error:
        raise InputError(
            f"{error}, or a bool tensor [batch, keys]", code=error.code, **error.values
        ) from None
    return Queries(asked.kind, sample=asked.sample, seed=seed)


def select(
    queries: Queries, frame: Geometry, reply: CompletionSpan, classes: Tensor | None, groups: int
) -> QuerySelection | None:
    """The rows of this pass that count; None where there are none."""
    if queries.name == "last" and classes is None and reply.end is None:
        row = min(reply.start - frame.first_query, frame.queries) - 1
        if row >= 0 and frame.real_queries is None and frame.form != "interval":
            return _one_row(frame, row)
    counted = None
    if queries.name != "all" or frame.real_queries is not None or reply.call is not None:
        counted = chosen(queries, frame, reply)
    if counted is not None and not bool(counted.any()):
        return None
    count = torch.full((frame.batch,), float(frame.queries), dtype=torch.float64)
    if counted is not None:
        count = counted.sum(1).double()
    group = None if classes is None else _classes(frame, classes)
    whole = _whole(frame, counted, count, group)
    parts: tuple[RowBlock, ...] = (whole,)
    # Where a sample would not cost a fraction of a census, a census it is.
    enough = frame.queries > max(4 * queries.sample, 2 * NEAR)
    if queries.name == "sample" and enough and int(count.min()) >= queries.sample:
        parts = _sample(queries, frame, counted, group)
    return QuerySelection(
        frame=frame,
        whole=whole,
        parts=parts,
        count=count,
        counted=counted,
        group=group,
        groups=groups,
    )


def _one_row(frame: Geometry, row: int) -> QuerySelection:
    """The same row of every sequence, where none has padding: nothing to work out."""
    B, own = frame.batch, row + frame.first_query - frame.first_key
    counted = torch.zeros(B, frame.queries, dtype=torch.bool)
    counted[:, row] = True
    stop = row + 1 if frame.form == "causal" else frame.keys
    if stop == own + 1 and not frame.cross:  # nothing has to be sent to the device
        whole = RowBlock(rows=1, only=row, causal=True, shift=own)
    else:
        bounds = torch.tensor([0, stop, frame.keys if frame.cross else own], dtype=torch.int32)
        bounds = bounds.to(frame.device, non_blocking=True)
        start, stop, where = (bound.repeat(B, 1) for bound in bounds)
        whole = RowBlock(rows=1, only=row, start=start, stop=stop, own=where)
    return QuerySelection(
        frame=frame,
        whole=whole,
        parts=(whole,),
        count=torch.ones(B, dtype=torch.float64),
        counted=counted,
        group=None,
        groups=0,
    )


def chosen(queries: Queries, frame: Geometry, reply: CompletionSpan) -> Tensor | None:
    """bool [B, Q] on the CPU: the queries asked for, never padding; None for all of them."""
    positions, real = frame.positions(), frame.real_queries
    if reply.end is not None and int(reply.end.min()) < frame.first_query + frame.queries:
        going_on = positions < reply.end[:, None]
        real = going_on if real is None else real & going_on
    if queries.name in ("all", "sample"):
        return real
    shape = (frame.batch, frame.queries)
    generated = (positions >= reply.start).expand(shape)
    if queries.name == "mask":
        wanted = _masked(queries.mask, frame)
    elif queries.name == "generated":
        wanted = generated
    else:
        prompt = ~generated if real is None else ~generated & real
        wanted = _last(prompt) if reply.last is None else positions == reply.last[:, None]
        wanted = wanted.expand(shape)
        if queries.name == "predicts":
            wanted = wanted | generated
    return wanted if real is None else wanted & real


def _last(which: Tensor) -> Tensor:
    """bool [B, Q]: the last of these queries of each sequence; none where it has none."""
    order = torch.arange(which.shape[1])
    return which & (order == torch.where(which, order, -1).amax(1, keepdim=True))


def _masked(mask: Tensor | None, frame: Geometry) -> Tensor:
    assert mask is not None
    B, Q = frame.batch, frame.queries
    if mask.shape[0] != B or (frame.first_query == 0 and mask.shape[1] < Q):
        raise InputError(
            f"the query mask has shape {list(mask.shape)}; this forward pass has "
            f"batch {B} and {Q} tokens, so it must be [{B}, {Q}]",
            code="wrong-shape",
            argument="queries",
            got=list(mask.shape),
        )
    wanted = torch.zeros(B, Q, dtype=torch.bool)
    known = min(max(mask.shape[1] - frame.first_query, 0), Q)
    wanted[:, :known] = mask[:, frame.first_query : frame.first_query + known]
    return wanted


def _classes(frame: Geometry, classes: Tensor) -> Tensor:
    """int64 [B, Q]: the class of each query, -1 beyond the classes given."""
    if classes.shape[0] != frame.batch:
        raise InputError(
            f"classes has {classes.shape[0]} rows, and the batch has {frame.batch} sequences; it "
            "must be [batch, keys]",
            code="wrong-shape",
            argument="classes",
            got=list(classes.shape),
        )
    group = torch.full((frame.batch, frame.queries), -1, dtype=torch.int64)
    known = min(max(classes.shape[1] - frame.first_query, 0), frame.queries)
    group[:, :known] = classes[:, frame.first_query : frame.first_query + known]
    return group


def _whole(
    frame: Geometry, counted: Tensor | None, count: Tensor, group: Tensor | None
) -> RowBlock:
    """All counted rows; gathered where few count, so that the cost goes with their number."""
    if counted is None and frame.form == "causal":
        moved = None if group is None else group.to(frame.device)
        return RowBlock(rows=frame.queries, causal=True, group=moved)
    most = int(count.max())
    if counted is None or 2 * most > frame.queries:
        return _part(frame, None, counted, group)
    # The counted rows of each sequence; shorter ones are filled with rows that do not count.
    index = torch.topk(counted.int(), most, dim=1).indices.sort(1).values
    return _part(frame, index, counted, group)


def _part(
    frame: Geometry,
    index: Tensor | None,
    counted: Tensor | None,
    group: Tensor | None,
    *,
    low: Tensor | None = None,
    high: Tensor | None = None,
    weight: Tensor | None = None,
    shrink: Tensor | None = None,
) -> RowBlock:
    """Rows on the device. `low` and `high` [Q] narrow what each row looks at."""
    own = frame.own().expand(frame.batch, -1)

    def rows(tensor: Tensor) -> Tensor:
        return tensor if index is None else tensor.gather(1, index)

    start, stop = (rows(bound) for bound in frame.intervals)
    if low is not None:
        start = torch.maximum(start, rows(low.expand_as(own)).clamp(max=frame.keys))
    if high is not None:
        stop = torch.minimum(stop, rows(high.expand_as(own)))
    if counted is not None:
        stop = torch.where(rows(counted), stop, 0)
    stop = torch.maximum(stop, start)
    device = frame.device
    only = None
    if index is not None and index.shape[1] == 1 and bool((index == index[0]).all()):
        only = int(index[0])
    return RowBlock(
        rows=start.shape[1],
        only=only,
        index=None if index is None else index.to(device, non_blocking=True),
        start=start.int().to(device, non_blocking=True),
        stop=stop.int().to(device, non_blocking=True),
        own=rows(own).int().contiguous().to(device, non_blocking=True),
        weight=None if weight is None else weight.float().to(device, non_blocking=True),
        shrink=None if shrink is None else shrink.float().to(device, non_blocking=True),
        group=None if group is None else rows(group).to(device, non_blocking=True),
    )


def _sample(
    queries: Queries, frame: Geometry, counted: Tensor | None, group: Tensor | None
) -> tuple[RowBlock, ...]:
    """Near keys for every query; far keys for two draws from each of K / 2 strata of positions."""
    B, strata = frame.batch, queries.sample // 2
    generator = torch.Generator().manual_seed(queries.seed + frame.first_query)
    index = torch.empty(B, 2 * strata, dtype=torch.int64)
    sizes = torch.empty(B, strata, dtype=torch.float64)
    for b in range(B):
        rows = torch.arange(frame.queries) if counted is None else counted[b].nonzero()[:, 0]
        edges = torch.linspace(0, len(rows), strata + 1, dtype=torch.float64).round().long()
        size = edges.diff()
        first = (torch.rand(strata, generator=generator) * size).long().clamp(max=size - 1)
        other = (torch.rand(strata, generator=generator) * (size - 1)).long()
        other = (other.clamp(max=size - 2) + 1 + first) % size
        index[b] = rows[torch.stack([edges[:-1] + first, edges[:-1] + other], 1).flatten()]
        sizes[b] = size
    own = frame.own()
    weight, shrink = (sizes / 2).repeat_interleave(2, 1), 1 - 2 / sizes
    near = _part(frame, None, counted, group, low=own - NEAR + 1, high=own + NEAR)
    parts = [
        _part(frame, index, None, group, high=own - NEAR + 1, weight=weight, shrink=shrink),
    ]
    if frame.form != "causal":
        parts.append(_part(frame, index, None, group, low=own + NEAR, weight=weight, shrink=shrink))
    return (near, *parts)
