"""Who can see whom in one forward pass, and which of those queries were asked for.

A `Geometry` is what a mask says; a `QuerySelection` is a frame under a choice of queries. They
are shared
by all layers that use the mask, and work out on the CPU, only when asked, what they are asked.
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
    """The geometry of one attention call: positions, padding, visible intervals."""

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
    """Start and stop of every query's interval, int64 [B, Q] on the CPU; None where the form
    says it all."""
    real_queries: Tensor | None = None
    """bool [B, Q] on the CPU; None where no query is padding."""
    real_keys: Tensor | None = None
    """bool [B, K] on the CPU, given only when padding lies inside the intervals."""
    seen: Tensor | None = None
    """bool [B or 1, H or 1, Q, K] on the model's device, given only where the intervals have gaps:
    who sees whom. Only the fallback can measure such attention."""
    cross: bool = False
    """Whether the keys are those of another text: then no query has a key of its own."""
    selections: dict[Any, "QuerySelection | None"] = field(default_factory=dict)
    """Selections already made, by the choice that made them."""
    elsewhere: dict[Any, "Geometry"] = field(default_factory=dict)
    """The same frame on other devices, for models that are spread over several, and as that of
    another text's queries."""

    @cached_property
    def intervals(self) -> tuple[Tensor, Tensor]:
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
        """The intervals as the kernels take them, on the model's device."""

        def bounds() -> tuple[Tensor, Tensor]:
            start, stop = self.intervals
            return start.int().to(self.device, non_blocking=True), stop.int().to(
                self.device, non_blocking=True
            )

        real = None if self.real_keys is None else self.real_keys.to(self.device, non_blocking=True)
        return VisibleRanges(form=self.form, bounds=bounds, real=real)

    def on(self, device: torch.device) -> "Geometry":
        """This frame on the given device."""
        if device == self.device:
            return self
        if device not in self.elsewhere:
            seen = None if self.seen is None else self.seen.to(device)
            self.elsewhere[device] = self._changed(device=device, seen=seen)
        return self.elsewhere[device]

    def visibility(self) -> Tensor:
        """bool [B, 1 or H, Q, K]: V, spelled out, for those who hold a matrix of weights anyway."""
        start, stop = self.intervals
        order = torch.arange(self.keys)
        seen = (order >= start[..., None]) & (order < stop[..., None])
        if self.real_keys is not None:
            seen &= self.real_keys[:, None]
        seen = seen[:, None].to(self.device)
        return seen if self.seen is None else seen & self.seen

    def with_gaps(self, seen: Tensor) -> "Geometry":
        """This frame where who sees whom is no interval."""
        return self._changed(form="interval", bounds=self.intervals, seen=seen)

    def across(self, past: int, padding: Tensor | None) -> "Geometry":
        """This frame where the queries are those of another text, which began `past` tokens ago.

        `padding` is the mask of that text, [B, tokens], 0 at padding.
        """
        real = None if padding is None else padding[:, past : past + self.queries].bool().cpu()
        if real is not None and (real.shape != (self.batch, self.queries) or bool(real.all())):
            real = None
        key = "across", past
        if key not in self.elsewhere:
            self.elsewhere[key] = self._changed(first_query=past, real_queries=real, cross=True)
        return self.elsewhere[key]

    def _changed(self, **fields: Any) -> "Geometry":
        """Another frame: what was worked out from this one does not hold for it."""
        return replace(self, selections={}, elsewhere={}, **fields)

    def let_go(self) -> None:
        """Forget what kernels kept from layer to layer: the pass is over."""
        if "visible" in vars(self):
            self.visible.cache.clear()
        for selection in self.selections.values():
            for part in (selection.whole, *selection.parts) if selection is not None else ():
                part.cache.clear()

    def own(self) -> Tensor:
        """int64 [Q]: where each query's own token is among the keys; beyond them if nowhere."""
        if self.cross:
            return torch.full((self.queries,), self.keys)
        return torch.arange(self.queries) + (self.first_query - self.first_key)

    def positions(self) -> Tensor:
        """int64 [Q]: positions of the queries in the sequence."""
        return torch.arange(self.queries) + self.first_query

    @cached_property
    def first_real(self) -> Tensor:
        """int64 [B]: position of the first token of the keys that is not padding; -1 where this
        pass has none."""
        if self.cross:
            return self.intervals[0].amin(1)
        if self.real_queries is None:
            return torch.full((self.batch,), self.first_query)
        first = self.real_queries.int().argmax(1) + self.first_query
        return torch.where(self.real_queries.any(1), first, -1)

    @cached_property
    def begun(self) -> bool:
        """Whether every sequence has such a token."""
        return (self.real_queries is None and not self.cross) or bool((self.first_real >= 0).all())

    def __getstate__(self) -> dict[str, Any]:
        """What the mask says; not what was worked out from it for a device."""
        kept = {name: value for name, value in vars(self).items() if name != "visible"}
        return kept | {"selections": {}, "elsewhere": {}}

    def counts(self) -> Tensor:
        """int64 [B, Q]: how many keys each query sees."""
        start, stop = self.intervals
        if self.real_keys is None:
            return stop - start
        seen = pad(self.real_keys.long().cumsum(1), (1, 0))
        return seen.gather(1, stop) - seen.gather(1, start)


def join(frames: list[Geometry]) -> Geometry:
    """Passes that follow one another as one, over the keys of all of them."""
    first, last = frames[0], frames[-1]
    if len(frames) == 1:
        return first
    keys = last.first_key + last.keys - first.first_key
    starts, stops, asked = [], [], []
    real = torch.ones(first.batch, keys, dtype=torch.bool)
    for frame in frames:
        at = frame.first_key - first.first_key
        start, stop = frame.intervals
        starts.append(start + at)
        stops.append(stop + at)
        shape = frame.batch, frame.queries
        asked.append(torch.ones(shape).bool() if frame.real_queries is None else frame.real_queries)
        if frame.real_keys is not None:
            real[:, at : at + frame.keys] = frame.real_keys
    padded = any(frame.real_queries is not None for frame in frames)
    holes = any(frame.real_keys is not None for frame in frames)
    return first._changed(
        queries=sum(frame.queries for frame in frames),
        keys=keys,
        form="interval",
        bounds=(torch.cat(starts, 1), torch.cat(stops, 1)),
        real_queries=torch.cat(asked, 1) if padded else None,
        real_keys=real if holes else None,
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowBlock:
    """Rows a kernel takes in one go, on the device: all queries in order (`index` None) or a
    gathered few. The fields are those of `KernelRows`."""

    rows: int
    index: Tensor | None = None
    """int64 [B, M], which queries."""
    only: int | None = None
    """The one query of every sequence, where `index` says, or would say, no more than that."""
    causal: bool = False
    shift: int = 0
    start: Tensor | None = None
    stop: Tensor | None = None
    own: Tensor | None = None
    weight: Tensor | None = None
    shrink: Tensor | None = None
    group: Tensor | None = None
    cache: dict[Any, Any] = field(default_factory=dict)

    def times(self, n: int) -> "RowBlock":
        """The same rows of every sequence, for a batch `n` times over."""
        if n == 1:
            return self
        if ("times", n) not in self.cache:
            each: dict[str, Any] = {
                name: None if (value := getattr(self, name)) is None else value.repeat(n, 1)
                for name in ("index", "start", "stop", "own", "weight", "shrink", "group")
            }
            self.cache["times", n] = replace(self, cache={}, **each)
        part: RowBlock = self.cache["times", n]
        return part


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class VisibilityCounts:
    """Everything about the counted queries that no score is needed for. On the CPU."""

    position: Tensor
    """float64 [B]: the sum of their positions."""
    eligible: Tensor
    """float64 [B, keys]: counted queries that see the key."""
    eligible_later: Tensor
    """float64 [B, keys]: those of them after the key."""
    uniform: Tensor
    """float64 [B, keys]: what the key would receive if every query spread its attention evenly."""
    uniform_later: Tensor
    """float64 [B, keys]: the part of it from queries after the key."""
    groups: Tensor
    """float64 [B, classes]: counted queries per class; no classes, no columns."""


@dataclass(eq=False, kw_only=True)
class QuerySelection:
    """The rows to reduce in one pass."""

    frame: Geometry
    whole: RowBlock
    """Every counted row over all it sees."""
    parts: tuple[RowBlock, ...]
    """Rows whose totals add up to those of `whole`: just `whole`, unless far keys are sampled."""
    count: Tensor
    """float64 [B]: the number of queries, |Q|."""
    counted: Tensor | None
    """bool [B, Q]: which queries count; None where all do. On the CPU."""
    group: Tensor | None
    """int64 [B, Q]: the class of each query, where classes were given. On the CPU."""
    groups: int

    @property
    def sampled(self) -> bool:
        """Whether the totals are estimates."""
        return self.parts[0] is not self.whole

    def without(self, sequences: Tensor) -> "QuerySelection":
        """This, less the queries of some sequences, bool [B]."""
        counted = self.counted_queries() & ~sequences[:, None]
        return replace(self, counted=counted, count=counted.sum(1).double())

    def rows(self, of_queries: Tensor) -> Tensor:
        """What there is for every query [B, Q], for the rows of `whole` [B, M]."""
        if self.whole.only is not None:
            return of_queries[:, self.whole.only : self.whole.only + 1]
        if self.whole.index is None:
            return of_queries
        return of_queries.gather(1, self.whole.index.to(of_queries.device))

    def visibility(self) -> Tensor:
        """bool [B, 1 or H, M, K]: what the counted rows of `whole` see, spelled out."""
        seen = self.frame.visibility() & self.counted_queries()[:, None, :, None].to(
            self.frame.device
        )
        if self.whole.only is not None:
            return seen[:, :, self.whole.only : self.whole.only + 1]
        if self.whole.index is None:
            return seen
        index = self.whole.index.to(seen.device)[:, None, :, None]
        return seen.gather(2, index.expand(-1, seen.shape[1], -1, seen.shape[3]))

    def counted_queries(self) -> Tensor:
        """bool [B, Q], spelled out."""
        if self.counted is not None:
            return self.counted
        return torch.ones(self.frame.batch, self.frame.queries, dtype=torch.bool)

    @cached_property
    def exposure(self) -> VisibilityCounts:
        """How often each key could be looked at."""
        frame, counted = self.frame, self.counted_queries()
        groups = torch.zeros(frame.batch, self.groups, dtype=torch.float64)
        if self.group is not None:
            member = self.group[..., None] == torch.arange(self.groups)
            groups = (member & counted[..., None]).sum(1).double()
        position = (frame.positions() * counted).sum(1).double()
        columns = self._by_intervals(counted) if frame.seen is None else self._by_matrix(counted)
        return VisibilityCounts(
            position=position * torch.nan if frame.cross else position, groups=groups, **columns
        )

    def _by_intervals(self, counted: Tensor) -> dict[str, Tensor]:
        """What there is of every key, by counting where intervals open and close."""
        frame = self.frame
        start, stop = frame.intervals
        before_own = torch.maximum(torch.minimum(stop, frame.own()), start)
        seen = frame.counts()
        one = (counted & (seen > 0)).double()

        def pile(weight: Tensor, end: Tensor) -> Tensor:
            ends = torch.zeros(frame.batch, frame.keys + 1, dtype=torch.float64)
            ends.scatter_add_(1, start, weight).scatter_add_(1, end, -weight)
            total = ends.cumsum(1)[:, : frame.keys]
            return total if frame.real_keys is None else total * frame.real_keys

        share = one / seen.clamp(min=1)
        return {
            "eligible": pile(one, stop).round(),
            "eligible_later": pile(one, before_own).round(),
            "uniform": pile(share, stop),
            "uniform_later": pile(share, before_own),
        }

    def _by_matrix(self, counted: Tensor) -> dict[str, Tensor]:
        """The same where the intervals have gaps."""
        frame = self.frame
        seen = frame.visibility().cpu() & counted[:, None, :, None]
        if seen.shape[1] > 1:
            raise ScopeError(
                "the heads of this model have different masks, so results that depend on which "
                "queries see a key (average, eligible, uniform, lift) are not defined; received is",
                code="masks-by-head",
            )
        one = seen[:, 0].double()
        share = one / one.sum(-1, keepdim=True).clamp(min=1)
        later = torch.arange(frame.keys) < frame.own()[:, None]
        return {
            "eligible": one.sum(1),
            "eligible_later": (one * later).sum(1),
            "uniform": share.sum(1),
            "uniform_later": (share * later).sum(1),
        }
