"""Builds the input of a kernel from a call and its counted rows."""

import torch
from torch import Tensor

from attnscope.capture.geometry import QuerySelection, RowBlock
from attnscope.kernels import AttentionCall, KernelRows
from attnscope.kernels.call import ScoreBias


def positions(selection: QuerySelection) -> Tensor:
    """int64 [B, M]: positions of the rows in the sequence, -1 for rows that do not count."""
    geometry = selection.geometry
    where = selection.gather_rows(geometry.positions().expand(geometry.batch, -1))
    return where.where(selection.gather_rows(selection.counted_queries()), -1)


def rows_of(
    call: AttentionCall, block: RowBlock, lse: Tensor | None, groups: int, repeats: int = 1
) -> KernelRows:
    """The kernel input for a block of rows, of a batch that is stacked `repeats` times."""
    q, k, sinks, real = call.q, call.k, call.sinks, call.visible.real
    if q.requires_grad:
        q = q.detach()
    if block.single_row is not None:
        q = q[:, :, block.single_row : block.single_row + 1]
        lse = None if lse is None else lse[:, :, block.single_row : block.single_row + 1]
    elif block.index is not None:
        index = block.index[:, None, :]
        q = q.gather(2, index[..., None].expand(-1, q.shape[1], -1, q.shape[3]))
        lse = None if lse is None else lse.gather(2, index.expand(-1, q.shape[1], -1))
    if real is not None and repeats > 1:
        real = real.repeat(repeats, 1)
    return KernelRows(
        q=q,
        k=k.detach() if k.requires_grad else k,
        scale=call.scale,
        causal=block.causal,
        diagonal_offset=block.shift,
        start=block.start,
        stop=block.stop,
        self_key=block.self_key,
        lse=lse.detach() if lse is not None and lse.requires_grad else lse,
        real=real,
        softcap=call.softcap,
        sinks=sinks.detach() if sinks is not None else None,
        key_bias=None if call.key_bias is None else call.key_bias.detach(),
        distance_bias=None if call.distance_bias is None else call.distance_bias.detach(),
        score_biases=_score_biases(call, block),
        weight=block.weight,
        fpc=block.shrink,
        group=block.group,
        groups=groups if block.group is not None else 0,
        cache=block.cache,
    )


def _score_biases(call: AttentionCall, block: RowBlock) -> tuple[ScoreBias, ...]:
    """The score biases of the rows. Changed calls are measured one by one, never stacked."""
    index = block.index
    if index is None and block.single_row is not None:
        index = torch.full((len(call.q), 1), block.single_row, device=call.q.device)
    return tuple(added.gather(index) for added in call.score_biases) if call.score_biases else ()
