"""The log-sum-exp of whole rows for sampled passes, which reduce rows in blocks of keys."""

import torch
from torch import Tensor

from attnscope import kernels
from attnscope.capture.conservation import check
from attnscope.capture.geometry import Geometry, RowBlock
from attnscope.capture.kernel_rows import rows_of
from attnscope.capture.pending import SiteQueue
from attnscope.capture.sums import unstack
from attnscope.kernels import AttentionCall
from attnscope.kernels.call import score_bounds

# Number of rows of a sampled pass that are recomputed over all keys, to check their log-sum-exp.
SPOT_CHECKED_ROWS = 4


def exact_lse(
    call: AttentionCall, geometry: Geometry, lse: Tensor | None, backend: str, repeats: int
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of all queries in float64, and the largest error of the given one."""
    causal = geometry.form == "causal"
    everything = RowBlock(
        rows=geometry.queries,
        causal=causal,
        start=None if causal else geometry.visible.start,
        stop=None if causal else geometry.visible.stop,
        self_key=geometry.self_keys()
        .int()
        .expand(geometry.batch, -1)
        .contiguous()
        .to(call.q.device),
    )
    rows = rows_of(call, everything.repeat(repeats), lse, 0, repeats)
    if rows.lse is not None:
        return kernels.exact_lse(backend)(rows)
    known = kernels.kernel(backend)(rows).lse
    assert known is not None
    return known.double(), torch.zeros(known.shape[:2], device=known.device)


def spot_check(
    queues: list[SiteQueue], call: AttentionCall, geometry: Geometry, lse: Tensor, backend: str
) -> None:
    """Check that a few whole rows add up to 1 with the log-sum-exp that blocks use."""
    L = len(queues)
    index = (
        torch.linspace(0, geometry.queries - 1, SPOT_CHECKED_ROWS).long().expand(geometry.batch, -1)
    )
    start, stop = (bound.gather(1, index).int().to(lse.device) for bound in geometry.visible_ranges)
    self_key = geometry.self_keys()[index].int().to(lse.device)
    few = RowBlock(
        rows=SPOT_CHECKED_ROWS,
        index=index.to(lse.device),
        start=start,
        stop=stop,
        self_key=self_key,
    ).repeat(L)
    rows = rows_of(call, few, lse, 0, L)
    sums = kernels.kernel(backend)(rows)
    assert rows.lse is not None
    sees = (stop > start).repeat(L, 1)[:, None]
    mass = sums.mass.double()
    if rows.sinks is not None:
        mass += (torch.exp(rows.sinks.double()[:, None] - rows.lse) * sees).sum(-1)
    off = (mass - sees.sum(-1)).abs() / SPOT_CHECKED_ROWS
    reach = sums.score_bound
    if reach is None:
        reach = score_bounds(rows).repeat_interleave(rows.q.shape[1] // rows.k.shape[1], 1)
    check(
        [queue.site.layer for queue in queues],
        torch.stack(unstack(off, L)),
        torch.stack(unstack(reach, L)),
        call.q.dtype,
        "recomputed rows add up to 1 only within",
    )
