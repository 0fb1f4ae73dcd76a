"""The definition, in code: dense, float64, one line per word of the definitions.

Every other kernel is tested against this one. It builds the n × n matrix on purpose; use it on
short texts, to check.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attnscope.kernels.autocast import without_autocast
from attnscope.kernels.call import distance_index, total_score_bias
from attnscope.kernels.one_row import PerQueryRequest, PerQueryResult, of_weights
from attnscope.kernels.rows import AttentionSums, KernelRows, score_bounds


def scores(rows: KernelRows) -> tuple[Tensor, Tensor]:
    """What the softmax takes [B, H, M, K], -inf where V [B, 1, M, K] is 0."""
    per_group = rows.q.shape[1] // rows.k.shape[1]
    k = rows.k.double().repeat_interleave(per_group, dim=1)
    x = rows.q.double() @ k.transpose(-1, -2) * rows.scale
    if rows.softcap is not None:
        x = rows.softcap * torch.tanh(x / rows.softcap)
    keys = torch.arange(rows.k.shape[2], device=rows.k.device)
    start, stop, self_key = rows.bounds()
    if rows.key_bias is not None:
        x = x + rows.key_bias.double()[:, :, None]
    if rows.distance_bias is not None:
        table = rows.distance_bias.double()
        index = distance_index(self_key, 0, rows.k.shape[2], table.shape[1])
        x = x + table[:, index].transpose(0, 1)
    every = slice(None)
    score_bias = total_score_bias(rows.score_biases, every, every, every, every)
    if score_bias is not None:
        x = x + score_bias.double()
    visible = (keys >= start[..., None]) & (keys < stop[..., None])
    if rows.real is not None:
        visible = visible & rows.real[:, None, :]
    visible = visible[:, None]
    return x.masked_fill(~visible, -torch.inf), visible


def weights(rows: KernelRows) -> tuple[Tensor, Tensor, Tensor]:
    """A [B, H, M, K] and V [B, 1, M, K] as the model used them, and the log-sum-exp [B, H, M]."""
    x, visible = scores(rows)
    lse = x.logsumexp(-1)
    if rows.sinks is not None:
        lse = torch.logaddexp(lse, rows.sinks.double()[:, None])
    if rows.partial:
        assert rows.lse is not None
        lse = rows.lse.double()
    A = torch.exp(x - lse[..., None]).where(visible, 0.0)
    return A, visible, lse


def by_query(rows: KernelRows, request: PerQueryRequest) -> PerQueryResult:
    """What was asked for of every row."""
    return of_weights(weights(rows)[0], request, scores(rows)[0])


def reduce(rows: KernelRows) -> AttentionSums:
    """All totals of these rows."""
    A, _, lse = weights(rows)
    sums = totals(A, rows.bounds()[2], lse, rows.weight, rows.fpc, rows.group, rows.groups)
    score_bound = score_bounds(rows).repeat_interleave(rows.q.shape[1] // rows.k.shape[1], 1)
    return replace(sums, lse=lse, score_bound=score_bound, max_logit=max_logit(rows))


def max_logit(rows: KernelRows) -> Tensor | None:
    """The largest score of a head [B, H]; None unless it is asked for."""
    if not rows.max_logit:
        return None
    x = scores(rows)[0].flatten(2)
    return torch.cat([x, x.new_full((*x.shape[:2], 1), -torch.inf)], 2).amax(2).float()


def exact_lse(rows: KernelRows) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of these rows, and how far the given one was from it, at most."""
    assert rows.lse is not None
    _, visible, lse = weights(replace(rows, lse=None))
    off = (lse - rows.lse).abs().where(visible.any(-1), 0.0)
    return lse.where(visible.any(-1), 0.0), off.amax(-1).float()


@without_autocast
def totals(
    A: Tensor,
    self_key: Tensor,
    lse: Tensor,
    weight: Tensor | None = None,
    fpc: Tensor | None = None,
    group: Tensor | None = None,
    groups: int = 0,
) -> AttentionSums:
    """The totals of a matrix A [B, H, M, K] that exists; the arguments are those of
    `KernelRows`."""
    keys = torch.arange(A.shape[-1], device=A.device)
    token = self_key[:, None, :, None]
    each = torch.ones_like(self_key, dtype=A.dtype) if weight is None else weight.to(A.dtype)
    weighted = A * each[:, None, :, None]
    entropy = torch.special.entr(A).sum(-1) * each[:, None]
    variance = entropy_variance = flow = None
    if fpc is not None:
        factor = fpc.to(A.dtype)[:, None]
        gap = weighted[:, :, 0::2] - weighted[:, :, 1::2]
        variance = (gap.square() * factor[..., None]).sum(2).float()
        gap = entropy[..., 0::2] - entropy[..., 1::2]
        entropy_variance = (gap.square() * factor).sum(-1).float()
    if group is not None:
        member = group[..., None] == torch.arange(groups, device=A.device)
        flow = torch.einsum("bhmk,bmc->bhck", weighted, member.to(A.dtype)).float()
    return AttentionSums(
        received=weighted.sum(2).float(),
        received_later=(weighted * (token > keys)).sum(2).float(),
        mass=weighted.sum((2, 3)).float(),
        entropy=entropy.sum(-1).float(),
        self_mass=(weighted * (token == keys)).sum((2, 3)).float(),
        lse=lse.float(),
        variance=variance,
        entropy_variance=entropy_variance,
        flow=flow,
    )
