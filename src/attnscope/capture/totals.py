"""The running sums of one layer, over the calls of one sequence: a forward pass, then each
decoding step with its longer row of keys.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscope.capture.frame import Exposure, Frame, Selection
from attnscope.kernels import Totals

__all__ = ["LayerTotals"]


@dataclass(slots=True, eq=False, kw_only=True)
class LayerTotals:
    """Sums over the counted queries so far. Keys are positions of the sequence."""

    prompt: int
    """Keys of the pass that began the sequence."""
    first: Tensor
    """int64 [B], on the CPU: position of the first real token."""
    backend: str
    keys: int = 0
    """Keys seen so far; the buffers may be longer, so that decoding does not copy them."""
    sums: Totals | None = None
    """None until a counted query has been seen."""
    exposure: Exposure | None = None
    sink: Tensor | None = None
    """float64 [B, H]: what learned sinks took; None where the layer has none."""
    sink_position: Tensor | None = None
    """float64 [B, H]: the same, times the position of the query."""
    sampled: bool = False
    top: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """For each call: positions of the queries [B, M], their keys and weights [B, H, M, k]."""

    def add(self, totals: Totals, first_key: int) -> None:
        """Add the sums of some rows; key 0 of these is at position `first_key`."""
        totals = replace(totals, lse=totals.lse[..., :0])  # a layer's largest vector: let it go
        if self.sums is None:
            self.sums = _resized(totals, first_key, 0) if first_key else totals
            return
        keys = first_key + totals.received.shape[-1]
        width = self.sums.received.shape[-1]
        if keys > width:  # and some more room, so that a long generation copies seldom
            self.sums = _resized(self.sums, 0, max(keys, width + 64, width + width // 4) - width)
        if totals.variance is not None and self.sums.variance is None:
            self.sums = replace(
                self.sums,
                variance=torch.zeros_like(self.sums.received),
                entropy_variance=torch.zeros_like(self.sums.entropy),
            )
        there = slice(first_key, keys)
        for name in ("received", "later", "variance", "flow"):
            if (more := getattr(totals, name)) is not None:
                getattr(self.sums, name)[..., there] += more
        for name in ("mass", "entropy", "own", "entropy_variance"):
            if (more := getattr(totals, name)) is not None:
                getattr(self.sums, name).add_(more)

    def expose(
        self, selection: Selection, frame: Frame, lse: Tensor, sinks: Tensor | None
    ) -> None:
        """Count the queries, what they could see, and what their sinks took."""
        self.sampled |= selection.sampled
        self.expose_rows(selection, frame)
        if sinks is not None:
            counted = selection.counted[:, None].to(lse.device)
            taken = torch.exp(sinks.float()[:, None] - lse).double() * counted
            where = frame.positions().expand(counted.shape[0], -1)
            if selection.whole.index is not None:
                where = where.gather(1, selection.whole.index.cpu())
            where = where[:, None].to(lse.device)
            self.sink = taken.sum(-1) + (0 if self.sink is None else self.sink)
            before = 0 if self.sink_position is None else self.sink_position
            self.sink_position = (taken * where).sum(-1) + before


    def expose_rows(self, selection: Selection, frame: Frame) -> None:
        """Count the queries and what they could see."""
        self.exposure = _joined(self.exposure, selection, frame)


def _joined(old: Exposure | None, selection: Selection, frame: Frame) -> Exposure:
    """Layers under one mask share the sum: it is made for the first and found by the others."""
    if old is None and frame.first_key == 0:
        return selection.exposure
    if id(old) not in frame.exposures:
        base = selection.exposure.empty() if old is None else old
        frame.exposures[id(old)] = (old, base.plus(selection.exposure, frame.first_key))
    return frame.exposures[id(old)][1]


def _resized(sums: Totals, left: int, right: int) -> Totals:
    def grow(tensor: Tensor) -> Tensor:
        return pad(tensor, (left, right))

    return replace(
        sums,
        received=grow(sums.received),
        later=grow(sums.later),
        variance=None if sums.variance is None else grow(sums.variance),
        flow=None if sums.flow is None else grow(sums.flow),
    )
