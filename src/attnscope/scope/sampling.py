"""The log-sum-exp of whole rows for sampled passes, which reduce rows in blocks of keys."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnscope import kernels
from attnscope.interception.captured_call import CallSpec
from attnscope.kernels import RowBlock
from attnscope.kernels.rows import rows_of, score_bounds
from attnscope.scope.conservation import check
from attnscope.scope.pending import unstack

# Number of rows of a sampled pass that are recomputed over all keys, to check their log-sum-exp.
SPOT_CHECKED_ROWS = 4


def exact_lse(
    spec: CallSpec, q: Tensor, k: Tensor, lse: Tensor | None, backend: str, layers: int
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of all queries in float64, and the largest error of the given one.

    The tensors are those of some layers, stacked along the batch.
    """
    geometry = spec.geometry
    everything = RowBlock(causal=geometry.form == "causal")
    if not everything.causal:
        self_key = geometry.self_keys().int().expand(geometry.batch, -1).contiguous()
        everything = RowBlock(
            start=geometry.visible.start,
            stop=geometry.visible.stop,
            self_key=self_key.to(q.device),
        )
    rows = rows_of(spec, q, k, everything.repeat(layers), lse, 0, layers)
    if rows.lse is not None:
        return kernels.exact_lse(backend)(rows)
    known = kernels.kernel(backend)(rows).lse
    assert known is not None
    return known.double(), torch.zeros(known.shape[:2], device=known.device)


def spot_check(
    layers: Sequence[int], spec: CallSpec, q: Tensor, k: Tensor, lse: Tensor, backend: str
) -> None:
    """Check that a few whole rows add up to 1 with the log-sum-exp that blocks use."""
    geometry, L = spec.geometry, len(layers)
    index = torch.linspace(0, geometry.queries - 1, SPOT_CHECKED_ROWS).long()
    index = index.expand(geometry.batch, -1)
    start, stop = (bound.gather(1, index).int().to(lse.device) for bound in geometry.visible_ranges)
    few = RowBlock(
        partial=True,  # rows are not divided by the sum that this checks
        index=index.to(lse.device),
        start=start,
        stop=stop,
        self_key=geometry.self_keys()[index].int().to(lse.device),
    )
    rows = rows_of(spec, q, k, few.repeat(L), lse, 0, L)
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
        layers,
        torch.stack(unstack(off, L)),
        torch.stack(unstack(reach, L)),
        q.dtype,
        "recomputed rows add up to 1 only within",
    )
