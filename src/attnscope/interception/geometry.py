"""Which keys each query of a call sees.

A `Geometry` describes the mask of a call. All layers with the same mask share it. It computes its
values on the CPU when first needed.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    selections: dict[Any, Any] = field(default_factory=dict)
    """Memo of query selections (`scope/query_selection.py`), by choice of queries."""
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
