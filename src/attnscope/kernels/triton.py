"""The streamed kernels in Triton, for CUDA: column sums of A, and attention row by row.

Three layers: the jit functions (`triton_jit.py`), which know tiles; the launchers, which know
tensors; and `reduce` and `attend`, which know the definitions.
"""

import math
from array import array
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscope.kernels import one_row, streaming, triton_jit
from attnscope.kernels.autocast import without_autocast
from attnscope.kernels.call import LARGE, AttentionCall, AttentionSums, KernelRows, reach_of
from attnscope.kernels.one_row import PerQueryRequest, PerQueryResult
from attnscope.kernels.triton_launch import launch
from attnscope.kernels.triton_tiles import (
    INTERPRETED,
    LONG,
    extent,
    flat,
    ranges,
    row_tile,
    rowwise,
    tile,
    wide,
)

LOG2E = math.log2(math.e)
# Sampled rows whose own entropy is looked at, to tell how much entropy varies between rows, and
# the number of pieces their keys are cut into.
SPREAD_ROWS, SPLIT_KEYS = 256, 32
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
    if exact or rows.key_bias is not None or rows.distance_bias is not None or rows.links:
        return streaming.reduce(rows)
    if rows.lse is None:
        rows = replace(rows, lse=_by_rows(rows.filled(), None)[1])
    else:  # the tiles are float32 throughout, and so is what is taken off their scores
        rows = replace(rows, lse=rows.lse.float())
    return _reduce(rows) if rows.group is None else _reduce_groups(rows.filled())


@without_autocast
def refine(rows: KernelRows) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of whole rows in float64, and how far the given one was from it."""
    return streaming.refine(rows)


@without_autocast
def by_query(rows: KernelRows, asked: PerQueryRequest) -> PerQueryResult:
    """What was asked for of every row. Masses are made here, where float32 has the digits of every
    score; all else as on any device, a few whole rows at a time."""
    only_masses = asked.keys is None and asked.spans is None and not (asked.entropies or asked.top)
    biased = rows.key_bias is not None or rows.distance_bias is not None or rows.links
    here = rows.q.is_cuda or INTERPRETED  # not so of some layers of a model spread over devices
    if asked.shares is None or not only_masses or biased or not here:
        return one_row.by_query(rows, asked)
    if not bool((reach_of(rows) <= LARGE).all()):
        return one_row.by_query(rows, asked)
    rows = rows.filled()
    if rows.lse is None:
        rows = replace(rows, lse=_by_rows(rows, None)[1])
    parts = [_masses(rows, some) for some in torch.split(asked.shares, MOST_CLASSES, 2)]
    return PerQueryResult(mass=torch.cat([mass for mass, _ in parts], 3), drift=parts[0][1])


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a call under any visibility: soft-cap, sinks and links included."""
    rows = KernelRows(
        q=call.q,
        k=call.k,
        scale=call.scale,
        start=call.visible.start,
        stop=call.visible.stop,
        real=call.visible.real,
        softcap=call.softcap,
        sinks=call.sinks,
        links=call.links,
        cache=call.visible.cache,
    )
    out, lse = _by_rows(rows, call.v)
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
    if (step > 2 and not INTERPRETED) or rows.group is not None or rows.shrink is not None:
        return None
    if across[3] != 1 or along[3] != 1 or not lse[0].is_contiguous():
        return None
    if lse[0].dtype != torch.float32 or rows.q.shape[2] == 0:
        return None
    places = array("q")
    for tensors, strides, ahead in ((q, across, first * across[2] * step), (k, along, 0)):
        for tensor in tensors:
            places.append(tensor.data_ptr() + ahead)
            if places[-1] % 16 or tensor.stride() != strides:
                return None
    for tensor in lse:
        places.append(tensor.data_ptr() + 4 * first)
        if tensor.stride() != down:
            return None
    table = torch.frombuffer(places, dtype=torch.int64).view(3, -1)
    table = table.to(rows.q.device, non_blocking=True)
    return _reduce(rows, table, B * len(q), lse[0].shape[2])


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
    q, k = rowwise(rows.q), rowwise(rows.k)
    paired, triangular = rows.shrink is not None, rows.triangular
    if not triangular:
        rows = rows.filled()
    out = q.new_empty((3 if paired else 2, B, H, K), dtype=torch.float32)
    assert rows.lse is not None
    BM, BN, options = tile(D, q, M)
    blocks = triton.cdiv(K, BN)
    scalars = q.new_empty((blocks, B, H, 3), dtype=torch.float32)
    met = None if triangular else ranges(rows, BM, BN)
    at_q, at_k = (q, q.stride(0), 0, 0), (k, k.stride(0), 0, 0)
    flat_q = flat(q, BM, M) if table is None else None
    flat_k = flat(k, BN, M) if table is None else None
    if flat_q is not None and flat_k is not None:
        at_q, at_k = flat_q, flat_k
    where = (at_q[0], at_k[0], rows.lse.contiguous()) if table is None else table.unbind()
    by_head = M >= LONG
    if M:
        arguments = (
            *where, rows.start, rows.stop, rows.own,
            rows.weight, rows.shrink, rows.real, met, out, scalars,
            at_q[1], q.stride(1), q.stride(2), at_q[2], at_q[3],
            at_k[1], k.stride(1), k.stride(2), at_k[2], at_k[3],
            H, H // G, M, K, D, rows.shift, batch, M if lse_h is None else lse_h, B * H * K,
            rows.scale * LOG2E, (rows.softcap or 0.0) * LOG2E,
            triangular, rows.softcap is not None, rows.weight is not None, paired,
            rows.real is not None, at_q is flat_q, BM, BN, wide(D), wide(D) == D, M % BM == 0,
            by_head, None if table is None else _TYPES[q.dtype],
        )  # fmt: skip
        grid = (blocks, B * H) if by_head else (B * H, blocks)
        launch(triton_jit.columns, grid, arguments, options)
    else:
        out.zero_()
        scalars.zero_()
    mass, entropy, own = (scalars[0] if blocks == 1 else scalars.sum(0)).unbind(-1)
    return AttentionSums(
        received=out[0],
        later=out[1],
        mass=mass,
        entropy=entropy,
        own=own,
        lse=rows.lse,
        variance=out[2] if paired else None,
        entropy_variance=_entropy_variance(rows) if paired else None,
    )


def _reduce_groups(rows: KernelRows) -> AttentionSums:
    """Each group of queries by itself, gathered, so that together they cost what all cost."""
    assert rows.group is not None
    assert rows.lse is not None
    B, H, _, D = rows.q.shape
    start, stop, own = rows.bounds()
    parts = []
    for c in (-1, *range(rows.groups)):
        member = rows.group == c
        width = max(int(member.sum(1).max()), 1)
        index = torch.argsort(~member, dim=1, stable=True)[:, :width]
        weight = member.gather(1, index).float()
        if rows.weight is not None:
            weight = weight * rows.weight.gather(1, index)
        wide = index[:, None].expand(B, H, -1)
        some = replace(
            rows,
            q=rows.q.gather(2, wide[..., None].expand(-1, -1, -1, D)),
            lse=rows.lse.gather(2, wide),
            start=start.gather(1, index),
            stop=stop.gather(1, index),
            own=own.gather(1, index),
            causal=False,
            weight=weight,
            shrink=None,
            group=None,
            cache={},
        )
        parts.append(_reduce(some))
    names = ("received", "later", "mass", "entropy", "own")
    sums = {name: torch.stack([getattr(p, name) for p in parts]).sum(0) for name in names}
    spread = _reduce(replace(rows, group=None)) if rows.shrink is not None else None
    return AttentionSums(
        **sums,
        lse=rows.lse,
        flow=torch.stack([p.received for p in parts[1:]], 2),
        variance=None if spread is None else spread.variance,
        entropy_variance=None if spread is None else spread.entropy_variance,
    )


def _masses(rows: KernelRows, shares: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [B, H, M, C]: A times the shares [B, K, C], every row divided by its own sum; and how
    far that was from 1 [B, H, M]."""
    B, H, M, D = rows.q.shape
    G, K, C = *rows.k.shape[1:3], shares.shape[2]
    q, k = rowwise(rows.q), rowwise(rows.k)
    exact = q.element_size() > 2
    one = shares.new_ones(B, K, 1)
    columns = torch.cat([shares, one], 2).float()
    if not exact:  # what 16 bits leave of a share has a column of its own
        most = columns.half()
        rest = (columns - most.float()).half()[..., :C]
        columns = torch.cat([most, rest], 2) if bool(rest.any()) else most
    BE = wide(columns.shape[2])
    columns = torch.nn.functional.pad(columns, (0, BE - columns.shape[2])).contiguous()
    out = q.new_zeros((B, H, M, BE), dtype=torch.float32)
    BM, BN, options = row_tile(wide(D), q)
    low, high = extent(rows, BM)
    assert rows.lse is not None
    lse = rows.lse.float().contiguous()
    if M:
        arguments = (
            q, k, lse, columns, rows.start, rows.stop, rows.real, low, high, out,
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            H, H // G, M, K, D, rows.scale * LOG2E, (rows.softcap or 0.0) * LOG2E,
            rows.softcap is not None, rows.real is not None, exact, BM, BN, wide(D), BE,
        )  # fmt: skip
        launch(triton_jit.row_masses, (triton.cdiv(M, BM), B * H), arguments, options)
    mass, total = out[..., :C], out[..., C]
    if BE >= 2 * C + 1:
        mass = mass + out[..., C + 1 : 2 * C + 1]  # zeros where shares are exact
    taken = torch.zeros_like(lse)
    if rows.sinks is not None:
        taken = (rows.sinks.float()[:, None] - lse).exp()
    sees = (total > 0) | (lse != 0)
    whole = (total + taken).where(sees, 1.0)
    return mass / whole[..., None], (whole - 1).abs()


def _entropy_variance(rows: KernelRows) -> Tensor:
    """How much the entropy of the sampled rows varies within strata, from some of the strata."""
    assert rows.shrink is not None
    assert rows.lse is not None
    strata = rows.shrink.shape[1]
    pick = torch.arange(0, strata, max(1, 2 * strata // SPREAD_ROWS), device=rows.q.device)
    index = torch.stack([2 * pick, 2 * pick + 1], 1).flatten()
    q, k = rows.q[:, :, index], rowwise(rows.k)
    B, H, M, D = q.shape
    start, stop, _ = (bound[:, index].contiguous() for bound in rows.bounds())
    BM, BN, options = row_tile(wide(D), q)
    split = max(1, triton.cdiv(k.shape[2], BN * SPLIT_KEYS))
    grid = (triton.cdiv(M, BM), B * H, triton.cdiv(k.shape[2], BN * split))
    pieces = q.new_zeros((grid[2], B, H, M), dtype=torch.float32)
    arguments = (
        q, k, rows.lse[:, :, index].contiguous(), start, stop, rows.real, pieces,
        q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
        H, H // k.shape[1], M, k.shape[2], D,
        rows.scale * LOG2E, (rows.softcap or 0.0) * LOG2E,
        rows.softcap is not None, rows.real is not None, split, BM, BN, wide(D),
    )  # fmt: skip
    launch(triton_jit.row_entropy, grid, arguments, options)
    entropy = pieces.sum(0)
    if rows.weight is not None:
        entropy = entropy * rows.weight[:, None, index]
    gap = entropy[..., 0::2] - entropy[..., 1::2]
    return (gap.square() * rows.shrink[:, None, pick]).sum(-1) * (strata / len(pick))


def _by_rows(rows: KernelRows, v: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Log-sum-exp of each row and, given values, the output."""
    B, H, M, D = rows.q.shape
    G, K = rows.k.shape[1:3]
    q, k = rowwise(rows.q), rowwise(rows.k)
    values = k if v is None else rowwise(v)
    E = values.shape[3]
    out = None if v is None else q.new_empty((B, M, H, E)).transpose(1, 2)
    lse = q.new_zeros((B, H, M), dtype=torch.float32)
    BM, BN, options = row_tile(max(wide(D), wide(E)), q)
    low, high = extent(rows, BM)
    links, linked = _stacked(rows)
    shown = lse if out is None else out
    if M:
        arguments = (
            q, k, values, rows.start, rows.stop, rows.real, rows.sinks, links, linked,
            low, high, shown, lse,
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            values.stride(0), values.stride(1), values.stride(2),
            shown.stride(0), shown.stride(1), shown.stride(2),
            H, H // G, M, K, D, E, rows.scale * LOG2E, (rows.softcap or 0.0) * LOG2E,
            rows.softcap is not None, rows.real is not None, rows.sinks is not None,
            v is not None, len(rows.links), BM, BN, wide(D), wide(E),
        )  # fmt: skip
        launch(triton_jit.attention, (triton.cdiv(M, BM), B * H), arguments, options)
    return out, lse


def _stacked(rows: KernelRows) -> tuple[Tensor | None, Tensor | None]:
    """What links add, float32 [links, B, H, K], and to which rows, bool [links, B, M].

    Layers under one mask and the same links share it.
    """
    if not rows.links:
        return None, None
    key = "links", rows.links
    if key not in rows.cache:
        B, H, M, _ = rows.q.shape
        bias = [link.bias.expand(B, H, rows.k.shape[2]) for link in rows.links]
        every = torch.ones(B, M, dtype=torch.bool, device=rows.q.device)
        meant = [every if link.queries is None else link.queries for link in rows.links]
        rows.cache[key] = torch.stack(bias), torch.stack(meant)
    links, linked = rows.cache[key]
    return links, linked
