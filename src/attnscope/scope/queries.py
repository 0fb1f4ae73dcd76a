"""The argument `queries`: which queries of a call count.

"all" · "last" · "generated" · "predicts" · "sample:K" · a bool tensor [batch, keys].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnscope.errors import InputError, wrong_shape
from attnscope.interception.generation import CompletionSpan
from attnscope.interception.geometry import Geometry
from attnscope.spec.queries import IN_A_WATCH, parse_queries

# Attention is strongest close to the diagonal and hardest to sample there. So keys less than this
# far from a query are counted exactly for every query.
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
            raise wrong_shape("queries", "a bool tensor [batch, keys]", queries)
        return Queries("mask", mask=queries.detach().cpu())
    try:
        parsed = parse_queries(queries, IN_A_WATCH)
    except InputError as error:
        raise InputError(
            f"{error}, or a bool tensor [batch, keys]", code=error.code, **error.values
        ) from None
    return Queries(parsed.kind, sample=parsed.sample, seed=seed)


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
        raise wrong_shape("queries", f"[{B}, {Q}] as this forward pass", mask)
    selected = torch.zeros(B, Q, dtype=torch.bool)
    known = min(max(mask.shape[1] - geometry.first_query, 0), Q)
    selected[:, :known] = mask[:, geometry.first_query : geometry.first_query + known]
    return selected


def draw(
    n: int, seed: int, geometry: Geometry, counted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw n queries, two from each stratum of positions: index, weight and fpc of a `RowBlock`."""
    B, strata = geometry.batch, n // 2
    generator = torch.Generator().manual_seed(seed + geometry.first_query)
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
    return index, (sizes / 2).repeat_interleave(2, 1), 1 - 2 / sizes
