"""The largest score of each query, for calls of which a hook gets the full weights."""

import torch
from torch import Tensor

from attnscope.interception.geometry import Geometry
from attnscope.kernels import AttentionCall, RowBlock, reference
from attnscope.kernels.autocast import without_autocast
from attnscope.kernels.rows import rows_of

# How far weights may be from the softmax of the scores, by the size of their type in bytes.
TOLERANCE = {2: 2e-2, 4: 1e-3, 8: 1e-3}


@torch.no_grad()
@without_autocast
def row_max(call: AttentionCall, geometry: Geometry, weights: Tensor) -> Tensor | None:
    """[B, H, Q]: the largest score of a key that a query sees, -inf if it sees none.

    None if the weights [B, H, Q, K] are not the softmax of the scores, because the model's
    attention has arguments that attnscope does not support.
    """
    position = torch.arange(call.first, call.first + call.q.shape[2], device=call.q.device)
    block = RowBlock(
        start=call.visible.start,
        stop=call.visible.stop,
        self_key=position.int().expand(len(call.q), -1),
    )
    rows, largest = rows_of(call, call.q, call.k, block), []
    for b in range(len(call.q)):  # a matrix of float64 at a time
        x = reference.scores(rows.select_rows(b, slice(None)))[0]
        if call.bias is not None:
            x = x + call.bias[b % len(call.bias)].double()
        if geometry.gap_mask is not None:
            mask = geometry.gap_mask.to(x.device)
            x = x.masked_fill(~mask[b % len(mask)], -torch.inf)
        lse = x.logsumexp(-1, keepdim=True)
        if call.sinks is not None:
            lse = torch.logaddexp(lse, call.sinks.double()[:, None, None])
        expected, sees = torch.exp(x - lse), (x > -torch.inf).any(-1, keepdim=True)
        deviation = (expected - weights[b : b + 1].double()).where(sees, 0.0).abs().max()
        if not bool(deviation <= TOLERANCE[weights.element_size()]):
            return None
        largest.append(x.amax(-1))
    return torch.cat(largest)
