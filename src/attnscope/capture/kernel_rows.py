"""The rows of a call that count, as a kernel takes them. Must not know who asked for them."""

import torch
from torch import Tensor

from attnscope.capture.geometry import QuerySelection, RowBlock
from attnscope.kernels import AttentionCall, KernelRows
from attnscope.kernels.call import ScoreBias


def positions(selection: QuerySelection) -> Tensor:
    """int64 [B, M]: where the rows stand in the sequence, -1 for those that do not count."""
    frame = selection.frame
    where = selection.rows(frame.positions().expand(frame.batch, -1))
    return where.where(selection.rows(selection.counted_queries()), -1)


def rows_of(
    call: AttentionCall, part: RowBlock, lse: Tensor | None, groups: int, times: int = 1
) -> KernelRows:
    """The rows of a part, gathered where it says so; of a batch that stands there `times` times."""
    q, k, sinks, real = call.q, call.k, call.sinks, call.visible.real
    if q.requires_grad:
        q = q.detach()
    if part.only is not None:
        q = q[:, :, part.only : part.only + 1]
        lse = None if lse is None else lse[:, :, part.only : part.only + 1]
    elif part.index is not None:
        index = part.index[:, None, :]
        q = q.gather(2, index[..., None].expand(-1, q.shape[1], -1, q.shape[3]))
        lse = None if lse is None else lse.gather(2, index.expand(-1, q.shape[1], -1))
    if real is not None and times > 1:
        real = real.repeat(times, 1)
    return KernelRows(
        q=q,
        k=k.detach() if k.requires_grad else k,
        scale=call.scale,
        causal=part.causal,
        shift=part.shift,
        start=part.start,
        stop=part.stop,
        own=part.own,
        lse=lse.detach() if lse is not None and lse.requires_grad else lse,
        real=real,
        softcap=call.softcap,
        sinks=sinks.detach() if sinks is not None else None,
        key_bias=None if call.key_bias is None else call.key_bias.detach(),
        distance_bias=None if call.distance_bias is None else call.distance_bias.detach(),
        links=_links(call, part),
        weight=part.weight,
        shrink=part.shrink,
        group=part.group,
        groups=groups if part.group is not None else 0,
        cache=part.cache,
    )


def _links(call: AttentionCall, part: RowBlock) -> tuple[ScoreBias, ...]:
    """Of the rows of a part. Changed calls are measured one by one, so the batch is the call's."""
    index = part.index
    if index is None and part.only is not None:
        index = torch.full((len(call.q), 1), part.only, device=call.q.device)
    return tuple(link.among(index) for link in call.links) if call.links else ()
