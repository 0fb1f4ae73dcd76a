"""Which queries count: parsing the `queries` argument, and choosing rows in a frame.

"all" · "last" · "generated" · "sample:K" · a bool tensor [batch, keys].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnscope.capture.frame import Exposure, Frame, Part, Selection
from attnscope.errors import InputError

__all__ = ["Queries", "parse", "select"]

# Sampling: attention is strongest close to the diagonal and weakest to sample there, so keys up
# to this far behind a query are counted exactly for every query, and only farther ones sampled.
NEAR = 256


@dataclass(frozen=True, eq=False)
class Queries:
    """A choice of queries, as the user made it."""

    name: str
    """"all", "last", "generated", "sample" or "mask"."""
    mask: Tensor | None = None
    """bool [batch, keys] on the CPU."""
    sample: int = 0
    seed: int = 0


def parse(queries: object, seed: int) -> Queries:
    """Check the argument early, so that a typing error does not cost a forward pass."""
    if isinstance(queries, Tensor):
        if queries.dtype != torch.bool or queries.ndim != 2:
            raise InputError(
                "a query mask is a bool tensor [batch, keys]; got "
                f"{str(queries.dtype).removeprefix('torch.')} {list(queries.shape)}"
            )
        return Queries("mask", mask=queries.detach().cpu())
    if queries in ("all", "last", "generated"):
        return Queries(str(queries))
    if isinstance(queries, str) and queries.startswith("sample:"):
        size = queries.removeprefix("sample:")
        if not size.isdecimal() or int(size) < 4:
            raise InputError(f"queries={queries!r}: K of sample:K is a whole number of at least 4")
        return Queries("sample", sample=int(size), seed=seed)
    raise InputError(
        f"unknown queries {queries!r}; known: all, last, generated, sample:K, "
        "or a bool tensor [batch, keys]"
    )


def select(queries: Queries, frame: Frame, prompt: int, classes: Tensor | None, groups: int) -> (
    Selection | None
):
    """The rows of this pass that count; None where there are none.

    `prompt` is the number of keys of the pass that started the sequence.
    """
    counted = _counted(queries, frame, prompt)
    if not bool(counted.any()):
        return None
    B, Q = counted.shape
    group = None
    if classes is not None:
        group = torch.full((B, Q), -1, dtype=torch.int64)
        known = min(max(classes.shape[1] - frame.first_query, 0), Q)
        group[:, :known] = classes[:, frame.first_query : frame.first_query + known]
    if queries.name == "sample":
        whole, parts = _sample(queries, frame, counted, group)
    else:
        whole = _whole(frame, counted, group)
        parts = (whole,)
    return Selection(
        whole=whole,
        parts=parts,
        counted=counted if whole.index is None else counted.gather(1, whole.index.cpu()),
        exposure=_exposure(frame, counted, group, groups),
    )


def _counted(queries: Queries, frame: Frame, prompt: int) -> Tensor:
    """bool [B, Q]: the queries asked for, never padding."""
    B, Q = frame.start.shape
    real = frame.real_queries
    real = torch.ones(B, Q, dtype=torch.bool) if real is None else real
    positions = frame.positions()
    if queries.name in ("all", "sample"):
        return real
    if queries.name == "generated":
        return real & (positions >= prompt)
    if queries.name == "last":
        if frame.first_query > 0:  # the prompt is over
            return torch.zeros_like(real)
        last = torch.where(real, positions, -1).amax(1, keepdim=True)
        return real & (positions == last)
    mask = queries.mask
    assert mask is not None
    if mask.shape[0] != B or (frame.first_query == 0 and mask.shape[1] < Q):
        raise InputError(
            f"the query mask has shape {list(mask.shape)}; this forward pass has "
            f"batch {B} and {Q} tokens, so it must be [{B}, {Q}]"
        )
    wanted = torch.zeros_like(real)
    known = min(max(mask.shape[1] - frame.first_query, 0), Q)
    wanted[:, :known] = mask[:, frame.first_query : frame.first_query + known]
    return real & wanted


def _whole(frame: Frame, counted: Tensor, group: Tensor | None) -> Part:
    """All counted rows; gathered where few count, so that the cost goes with their number."""
    if bool(counted.all()):
        return _part(frame, None, None, group, causal=frame.visible.form == "causal")
    if 2 * int(counted.sum(1).max()) > counted.shape[1]:
        return _part(frame, None, counted, group)
    return _part(frame, _gathered(counted), counted, group)


def _gathered(counted: Tensor) -> Tensor:
    """int64 [B, M]: the counted rows of each sequence; shorter ones are filled with rows that do not."""
    width = int(counted.sum(1).max())
    return torch.argsort(~counted, dim=1, stable=True)[:, :width]


def _part(
    frame: Frame,
    index: Tensor | None,
    counted: Tensor | None,
    group: Tensor | None,
    *,
    causal: bool = False,
    low: Tensor | None = None,
    high: Tensor | None = None,
    weight: Tensor | None = None,
    shrink: Tensor | None = None,
) -> Part:
    """Rows on the device. `low` and `high` [B, Q] narrow what each row looks at."""
    start, stop = frame.start, frame.stop
    if low is not None:
        start = torch.maximum(start, low)
    if high is not None:
        stop = torch.minimum(stop, high)
    if counted is not None:
        stop = torch.where(counted, stop, 0)
    own = (frame.positions() - frame.first_key).expand_as(start)
    stop = torch.maximum(stop, start)

    def rows(tensor: Tensor) -> Tensor:
        return tensor if index is None else tensor.gather(1, index)

    return Part(
        index=None if index is None else index.to(frame.device),
        start=rows(start).int().to(frame.device),
        stop=rows(stop).int().to(frame.device),
        own=rows(own).int().contiguous().to(frame.device),
        causal=causal,
        weight=None if weight is None else weight.float().to(frame.device),
        shrink=None if shrink is None else shrink.float().to(frame.device),
        group=None if group is None else rows(group).to(frame.device),
    )


def _sample(
    queries: Queries, frame: Frame, counted: Tensor, group: Tensor | None
) -> tuple[Part, tuple[Part, ...]]:
    """Two draws from each of K / 2 strata of neighbouring positions, far keys only."""
    everything = _part(
        frame,
        None,
        None if bool(counted.all()) else counted,
        group,
        causal=frame.visible.form == "causal",
    )
    B, Q = counted.shape
    strata = queries.sample // 2
    if int(counted.sum(1).min()) < 2 * strata or Q <= 2 * NEAR:
        return everything, (everything,)  # a census costs no more than the sample
    generator = torch.Generator().manual_seed(queries.seed + frame.first_query)
    index = torch.empty(B, 2 * strata, dtype=torch.int64)
    sizes = torch.empty(B, strata, dtype=torch.float64)
    for b in range(B):
        rows = counted[b].nonzero()[:, 0]
        edges = torch.linspace(0, len(rows), strata + 1, dtype=torch.float64).round().long()
        size = edges.diff()
        first = (torch.rand(strata, generator=generator) * size).long().clamp(max=size - 1)
        other = (torch.rand(strata, generator=generator) * (size - 1)).long()
        other = (other.clamp(max=size - 2) + 1 + first) % size
        index[b] = rows[torch.stack([edges[:-1] + first, edges[:-1] + other], 1).flatten()]
        sizes[b] = size
    own = (frame.positions() - frame.first_key).expand(B, -1)
    weight = (sizes / 2).repeat_interleave(2, 1)
    shrink = 1 - 2 / sizes
    near = _part(
        frame,
        None,
        counted,
        group,
        low=own - NEAR + 1,
        high=own + NEAR,
    )
    far = [
        _part(frame, index, None, group, high=own - NEAR + 1, weight=weight, shrink=shrink),
        _part(frame, index, None, group, low=own + NEAR, weight=weight, shrink=shrink),
    ]
    far = [part for part in far if bool((part.stop > part.start).any())]
    return everything, (near, *far)


def _exposure(frame: Frame, counted: Tensor, group: Tensor | None, groups: int) -> Exposure:
    """How often each key could be looked at, by counting where intervals open and close."""
    B, K = counted.shape[0], frame.keys
    start, stop = frame.start, frame.stop
    own = (frame.positions() - frame.first_key).expand_as(start)
    before_own = torch.maximum(torch.minimum(stop, own), start)
    seen = frame.counts()
    one = (counted & (seen > 0)).double()

    def pile(weight: Tensor, end: Tensor) -> Tensor:
        ends = torch.zeros(B, K + 1, dtype=torch.float64)
        ends.scatter_add_(1, start, weight).scatter_add_(1, end, -weight)
        total = ends.cumsum(1)[:, :K]
        return total if frame.real_keys is None else total * frame.real_keys

    sizes = None
    if group is not None:
        member = group[..., None] == torch.arange(groups)
        sizes = (member & counted[..., None]).sum(1).double()
    return Exposure(
        count=counted.sum(1).double(),
        position=(frame.positions() * counted).sum(1).double(),
        eligible=pile(one, stop).round(),
        eligible_later=pile(one, before_own).round(),
        uniform=pile(one / seen.clamp(min=1), stop),
        groups=sizes,
    )
