"""The streamed kernels in Triton, for CUDA: column sums of A, and attention row by row.

The jit functions are in `triton_jit.py`; this module prepares their arguments and launches them.
"""

from array import array
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscope.kernels import one_row, streaming, triton_jit
from attnscope.kernels.autocast import without_autocast
from attnscope.kernels.call import LARGE, LOG2E
from attnscope.kernels.one_row import PerQueryRequest, PerQueryResult
from attnscope.kernels.rows import AttentionSums, KernelRows, score_bounds
from attnscope.kernels.streaming import exact_lse
from attnscope.kernels.triton_tiles import (
    INTERPRETED,
    LONG,
    contiguous_rows,
    key_extent,
    pow2,
    row_ranges,
    row_tile,
    tile,
    tma_view,
)

__all__ = ["attend", "by_query", "exact_lse", "reduce", "reduce_layers"]

# Number of sampled rows from which the variance of entropy is estimated, and the number of parts
# of their keys.
SPREAD_ROWS, SPLIT_KEYS = 256, 32
# A score in units of log2 that no row has: that of a block that no row sees.
LOWEST = -1.0e30
# Classes whose masses are made together: twice as many columns, and one more, are a tile's width.
MOST_CLASSES = 31
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@without_autocast
def reduce(rows: KernelRows) -> AttentionSums:
    """All totals of these rows.

    The tiles are float32, and take off a log-sum-exp that a fused operator rounded: nothing beside
    what 16 bits do to scores, and several times what float32 does. Those rows are streamed.
    """
    exact = rows.q.element_size() > 2 and not INTERPRETED
    if exact or rows.key_bias is not None or rows.distance_bias is not None or rows.score_biases:
        return streaming.reduce(rows)
    if rows.lse is None:
        rows = replace(rows, lse=_attention_rows(rows.with_bounds(), None)[1])
    else:  # the tiles are float32 throughout, and so is what is taken off their scores
        rows = replace(rows, lse=rows.lse.float())
    return _reduce(rows) if rows.group is None else _reduce_groups(rows.with_bounds())


@without_autocast
def by_query(rows: KernelRows, request: PerQueryRequest) -> PerQueryResult:
    """What was asked for of every row. Masses are made here, where float32 has the digits of every
    score; all else as on any device, a few whole rows at a time."""
    only_masses = (
        request.keys is None and request.spans is None and not (request.entropies or request.top)
    )
    biased = rows.key_bias is not None or rows.distance_bias is not None or rows.score_biases
    here = rows.q.is_cuda or INTERPRETED  # not so of some layers of a model spread over devices
    if request.shares is None or not only_masses or biased or not here:
        return one_row.by_query(rows, request)
    if not bool((score_bounds(rows) <= LARGE).all()):
        return one_row.by_query(rows, request)
    rows = rows.with_bounds()
    if rows.lse is None:
        rows = replace(rows, lse=_attention_rows(rows, None)[1])
    parts = [_masses(rows, some) for some in torch.split(request.shares, MOST_CLASSES, 2)]
    return PerQueryResult(mass=torch.cat([mass for mass, _ in parts], 3), lse_error=parts[0][1])


def attend(rows: KernelRows, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of these rows, without biases by key and distance."""
    out, lse = _attention_rows(rows, v)
    assert out is not None
    return out, lse


def reduce_layers(
    rows: KernelRows, q: list[Tensor], k: list[Tensor], lse: list[Tensor], first: int = 0
) -> AttentionSums | None:
    """The totals of several layers [layers · B, …] whose rows are those given but for queries, keys
    and log-sum-exp, taken from where they lie; None where they do not lie alike. The first row is
    query `first` of `q`."""
    step, B = q[0].element_size(), rows.q.shape[0]
    across, along, down = q[0].stride(), k[0].stride(), lse[0].stride()
    if (step > 2 and not INTERPRETED) or rows.group is not None or rows.fpc is not None:
        return None
    if across[3] != 1 or along[3] != 1 or not lse[0].is_contiguous():
        return None
    if rows.partial or lse[0].dtype != torch.float32 or rows.q.shape[2] == 0:
        return None
    pointers = array("q")
    for tensors, strides, ahead in ((q, across, first * across[2] * step), (k, along, 0)):
        for tensor in tensors:
            pointers.append(tensor.data_ptr() + ahead)
            if pointers[-1] % 16 or tensor.stride() != strides:
                return None
    for tensor in lse:
        pointers.append(tensor.data_ptr() + 4 * first)
        if tensor.stride() != down:
            return None
    table = torch.frombuffer(pointers, dtype=torch.int64).view(3, -1)
    table = table.to(rows.q.device, non_blocking=True)
    return _reduce(rows, table, B * len(q), lse[0].shape[2])


def _launch(
    program: Any, grid: tuple[int, ...], arguments: Any, options: dict[str, int], on: Tensor
) -> None:
    """Run a program on the device of a tensor."""
    with torch.cuda.device(on.get_device()):  # -1 for a CPU, in the interpreter
        program[grid](*arguments, **options)


def _reduce(
    rows: KernelRows,
    table: Tensor | None = None,
    sequences: int | None = None,
    lse_h: int | None = None,
) -> AttentionSums:
    """With a table, of several layers whose queries, keys and log-sum-exp lie at its addresses."""
    batch, H, M, D = rows.q.shape
    G, K = rows.k.shape[1:3]
    B = batch if sequences is None else sequences
    q, k = contiguous_rows(rows.q), contiguous_rows(rows.k)
    paired, triangular = rows.fpc is not None, rows.triangular
    if not triangular:
        rows = rows.with_bounds()
    out = q.new_empty((3 if paired else 2, B, H, K), dtype=torch.float32)
    assert rows.lse is not None
    BM, BN, options = tile(D, q, M)
    blocks = triton.cdiv(K, BN)
    scalars = q.new_empty((blocks, B, H, 4 if rows.max_logit else 3), dtype=torch.float32)
    visible_blocks = None if triangular else row_ranges(rows, BM, BN)
    at_q, at_k = (q, q.stride(0), 0, 0), (k, k.stride(0), 0, 0)
    flat_q = tma_view(q, BM, M) if table is None else None
    flat_k = tma_view(k, BN, M) if table is None else None
    if flat_q is not None and flat_k is not None:
        at_q, at_k = flat_q, flat_k
    where = (at_q[0], at_k[0], rows.lse.contiguous()) if table is None else table.unbind()
    by_head = M >= LONG
    if M:
        arguments = (
            *where, rows.start, rows.stop, rows.self_key,
            rows.weight, rows.fpc, rows.real, visible_blocks, out, scalars,
            at_q[1], q.stride(1), q.stride(2), at_q[2], at_q[3],
            at_k[1], k.stride(1), k.stride(2), at_k[2], at_k[3],
            H, H // G, M, K, D, rows.diagonal_offset, batch, M if lse_h is None else lse_h,
            B * H * K,
            rows.scale * LOG2E, (rows.softcap or 0.0) * LOG2E,
            triangular, rows.softcap is not None, rows.weight is not None, paired,
            rows.real is not None, at_q is flat_q, BM, BN, pow2(D), pow2(D) == D, M % BM == 0,
            by_head, None if table is None else _TYPES[q.dtype], rows.max_logit,
        )  # fmt: skip
        grid = (blocks, B * H) if by_head else (B * H, blocks)
        _launch(triton_jit.columns, grid, arguments, options, out)
    else:
        out.zero_()
        scalars.zero_()
        scalars[..., 3:] = LOWEST
    sums = scalars[0] if blocks == 1 else scalars.sum(0)
    mass, entropy, self_mass = sums[..., :3].unbind(-1)
    return AttentionSums(
        received=out[0],
        received_later=out[1],
        mass=mass,
        entropy=entropy,
        self_mass=self_mass,
        lse=rows.lse,
        variance=out[2] if paired else None,
        entropy_variance=_entropy_variance(rows) if paired else None,
        max_logit=_max_logit(scalars[..., 3]) if rows.max_logit else None,
    )


def _max_logit(scores: Tensor) -> Tensor:
    """[B, H]: the largest score of the blocks [blocks, B, H], which are in units of log2."""
    most = scores.amax(0)
    return (most / LOG2E).where(most > LOWEST / 2, -torch.inf)


def _reduce_groups(rows: KernelRows) -> AttentionSums:
    """Each group of queries by itself, gathered, so that together they cost what all cost."""
    assert rows.group is not None
    assert rows.lse is not None
    B, H, _, D = rows.q.shape
    start, stop, self_key = rows.bounds()
    parts = []
    for c in (-1, *range(rows.groups)):
        member = rows.group == c
        width = max(int(member.sum(1).max()), 1)
        index = torch.argsort(~member, dim=1, stable=True)[:, :width]
        weight = member.gather(1, index).float()
        if rows.weight is not None:
            weight = weight * rows.weight.gather(1, index)
        per_head = index[:, None].expand(B, H, -1)
        some = replace(
            rows,
            q=rows.q.gather(2, per_head[..., None].expand(-1, -1, -1, D)),
            lse=rows.lse.gather(2, per_head),
            start=start.gather(1, index),
            stop=stop.gather(1, index),
            self_key=self_key.gather(1, index),
            causal=False,
            weight=weight,
            fpc=None,
            group=None,
            cache={},
        )
        parts.append(_reduce(some))
    names = ("received", "received_later", "mass", "entropy", "self_mass")
    sums = {name: torch.stack([getattr(p, name) for p in parts]).sum(0) for name in names}
    spread = None
    if rows.fpc is not None:
        spread = _reduce(replace(rows, group=None, max_logit=False))
    return AttentionSums(
        **sums,
        lse=rows.lse,
        flow=torch.stack([p.received for p in parts[1:]], 2),
        max_logit=torch.stack([p.max_logit for p in parts if p.max_logit is not None]).amax(0)
        if rows.max_logit
        else None,
        variance=None if spread is None else spread.variance,
        entropy_variance=None if spread is None else spread.entropy_variance,
    )


def _masses(rows: KernelRows, shares: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [B, H, M, C]: A times the shares [B, K, C], every row divided by its own sum; and how
    far that was from 1 [B, H, M]."""
    B, H, M, D = rows.q.shape
    G, K, C = *rows.k.shape[1:3], shares.shape[2]
    q, k = contiguous_rows(rows.q), contiguous_rows(rows.k)
    exact = q.element_size() > 2
    one = shares.new_ones(B, K, 1)
    columns = torch.cat([shares, one], 2).float()
    if not exact:  # what 16 bits leave of a share has a column of its own
        most = columns.half()
        rest = (columns - most.float()).half()[..., :C]
        columns = torch.cat([most, rest], 2) if bool(rest.any()) else most
    BE = pow2(columns.shape[2])
    columns = torch.nn.functional.pad(columns, (0, BE - columns.shape[2])).contiguous()
    out = q.new_zeros((B, H, M, BE), dtype=torch.float32)
    BM, BN, options = row_tile(pow2(D), q)
    low, high = key_extent(rows, BM)
    assert rows.lse is not None
    lse = rows.lse.float().contiguous()
    if M:
        arguments = (
            q, k, lse, columns, rows.start, rows.stop, rows.real, low, high, out,
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            H, H // G, M, K, D, rows.scale * LOG2E, (rows.softcap or 0.0) * LOG2E,
            rows.softcap is not None, rows.real is not None, exact, BM, BN, pow2(D), BE,
        )  # fmt: skip
        _launch(triton_jit.row_masses, (triton.cdiv(M, BM), B * H), arguments, options, out)
    mass, total = out[..., :C], out[..., C]
    if BE >= 2 * C + 1:
        mass = mass + out[..., C + 1 : 2 * C + 1]  # zeros where shares are exact
    taken = torch.zeros_like(lse)
    if rows.sinks is not None:
        taken = (rows.sinks.float()[:, None] - lse).exp()
    sees = (total > 0) | (lse != 0)
    row_sum = (total + taken).where(sees, 1.0)
    return mass / row_sum[..., None], (row_sum - 1).abs()


def _entropy_variance(rows: KernelRows) -> Tensor:
    """How much the entropy of the sampled rows varies within strata, from some of the strata."""
    assert rows.fpc is not None
    assert rows.lse is not None
    strata = rows.fpc.shape[1]
    pick = torch.arange(0, strata, max(1, 2 * strata // SPREAD_ROWS), device=rows.q.device)
    index = torch.stack([2 * pick, 2 * pick + 1], 1).flatten()
    q, k = rows.q[:, :, index], contiguous_rows(rows.k)
    B, H, M, D = q.shape
    start, stop, _ = (bound[:, index].contiguous() for bound in rows.bounds())
    BM, BN, options = row_tile(pow2(D), q)
    split = max(1, triton.cdiv(k.shape[2], BN * SPLIT_KEYS))
    grid = (triton.cdiv(M, BM), B * H, triton.cdiv(k.shape[2], BN * split))
    pieces = q.new_zeros((grid[2], B, H, M), dtype=torch.float32)
    arguments = (
        q, k, rows.lse[:, :, index].contiguous(), start, stop, rows.real, pieces,
        q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
        H, H // k.shape[1], M, k.shape[2], D,
        rows.scale * LOG2E, (rows.softcap or 0.0) * LOG2E,
        rows.softcap is not None, rows.real is not None, split, BM, BN, pow2(D),
    )  # fmt: skip
    _launch(triton_jit.row_entropy, grid, arguments, options, pieces)
    entropy = pieces.sum(0)
    if rows.weight is not None:
        entropy = entropy * rows.weight[:, None, index]
    gap = entropy[..., 0::2] - entropy[..., 1::2]
    return (gap.square() * rows.fpc[:, None, pick]).sum(-1) * (strata / len(pick))


def _attention_rows(rows: KernelRows, v: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Log-sum-exp of each row and, given values, the output."""
    B, H, M, D = rows.q.shape
    G, K = rows.k.shape[1:3]
    q, k = contiguous_rows(rows.q), contiguous_rows(rows.k)
    values = k if v is None else contiguous_rows(v)
    E = values.shape[3]
    out = None if v is None else q.new_empty((B, M, H, E)).transpose(1, 2)
    lse = q.new_zeros((B, H, M), dtype=torch.float32)
    BM, BN, options = row_tile(max(pow2(D), pow2(E)), q)
    low, high = key_extent(rows, BM)
    biases, biased_rows = _stacked_biases(rows)
    shown = lse if out is None else out
    if M:
        arguments = (
            q, k, values, rows.start, rows.stop, rows.real, rows.sinks, biases, biased_rows,
            low, high, shown, lse,
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            values.stride(0), values.stride(1), values.stride(2),
            shown.stride(0), shown.stride(1), shown.stride(2),
            H, H // G, M, K, D, E, rows.scale * LOG2E, (rows.softcap or 0.0) * LOG2E,
            rows.softcap is not None, rows.real is not None, rows.sinks is not None,
            v is not None, len(rows.score_biases), BM, BN, pow2(D), pow2(E),
        )  # fmt: skip
        _launch(triton_jit.attention, (triton.cdiv(M, BM), B * H), arguments, options, lse)
    return out, lse


def _stacked_biases(rows: KernelRows) -> tuple[Tensor | None, Tensor | None]:
    """What links add, float32 [links, B, H, K], and to which rows, bool [links, B, M].

    Layers under one mask and the same links share it.
    """
    if not rows.score_biases:
        return None, None
    key = "score biases", rows.score_biases
    if key not in rows.cache:
        B, H, M, _ = rows.q.shape
        bias = [added_bias.bias.expand(B, H, rows.k.shape[2]) for added_bias in rows.score_biases]
        every = torch.ones(B, M, dtype=torch.bool, device=rows.q.device)
        meant = [
            every if added_bias.queries is None else added_bias.queries
            for added_bias in rows.score_biases
        ]
        rows.cache[key] = torch.stack(bias), torch.stack(meant)
    biases, biased_rows = rows.cache[key]
    return biases, biased_rows
