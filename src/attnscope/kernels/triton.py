"""The streamed kernels in Triton, for CUDA: column sums of A, and attention row by row.

Three layers: the jit functions, which know tiles; the launchers, which know tensors; and `reduce`
and `attend`, which know the definitions. Scores are in units of log2 throughout.

A column program holds one block of keys and runs over the queries that see it. It computes the
transposed scores (keys × queries), so that a key's sum stays inside a few threads.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnscope.kernels.call import AttentionCall, Rows, Totals

__all__ = ["attend", "reduce"]

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# A log-sum-exp no score reaches: its row gets weight 0, and 0 times its score is 0, not nan.
NOBODY = tl.constexpr(1.0e30)
MASKED = tl.constexpr(-1.0e4)
FAR = 1 << 30
# Sampled rows whose own entropy is looked at, to tell how much entropy varies between rows, and
# the number of pieces their keys are cut into.
SPREAD_ROWS, SPLIT_KEYS = 256, 32
# From this many queries on, the descriptors of the tensor copy engine pay for themselves, and
# heads are better taken one after the other.
LONG = 16384
# Asking Triton's settings reads the environment each time.
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def _scores(a, b, scale, cap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.dot(a, b, input_precision="ieee") * scale
    if SOFTCAP:
        # tanh(y) = 1 - 2 / (exp(2 y) + 1)
        y = tl.exp2(x * (2.0 * 1.4426950408889634) / cap)
        x = cap - 2.0 * cap / (y + 1.0)
    return x


@triton.jit
def _look(  # type: ignore[no-untyped-def]
    keys, q, q_row, q_col, q_m, lse_at, m, dims, M, D, scale, cap,
    SOFTCAP: tl.constexpr, TMA: tl.constexpr, EVEN_D: tl.constexpr, EVEN_M: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """log2 A of one tile, keys × queries, before the mask; rows past the end get weight 0."""
    rows = m * BM + tl.arange(0, BM)
    if TMA:
        queries = q.load([q_row + m * BM, q_col]).T
    else:
        there = rows if EVEN_M else tl.minimum(rows, M - 1)
        at = q + there[None, :].to(tl.int64) * q_m + dims[:, None]
        queries = tl.load(at) if EVEN_D else tl.load(at, mask=(dims < D)[:, None], other=0.0)
    x = _scores(keys, queries, scale, cap, SOFTCAP)
    if EVEN_M:
        given = tl.load(lse_at + rows)
    else:
        given = tl.load(lse_at + rows, mask=rows < M, other=NOBODY)
    return x - given[None, :] * 1.4426950408889634


@triton.jit
def _fold(x, N: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """[N, M] to [N, 8], adding up only what one thread holds: no exchange between threads."""
    return tl.sum(tl.reshape(x, [N, M // 8, 8]), 1)


@triton.jit
def _columns(  # type: ignore[no-untyped-def]
    q, k, lse, start, stop, own, weight, shrink, real, ranges, out, scalars,
    q_b, q_h, q_m, q_rows, q_cols, k_b, k_g, k_n, k_rows, k_cols,
    H, R, M, K, D, plane, scale, cap,
    CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, WEIGHTED: tl.constexpr, PAIRED: tl.constexpr,
    HOLES: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_M: tl.constexpr, BY_HEAD: tl.constexpr,
):  # fmt: skip
    """Column sums of A: one block of keys, all the queries that see it."""
    if BY_HEAD:  # a long text: one head's queries at a time stay in the second-level cache
        block, bh, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    else:  # a short one: the early keys, which most queries see, start first
        bh, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, h = bh // H, bh % H
    cols = block * BN + tl.arange(0, BN)
    dims = tl.arange(0, BD)
    if TMA:
        keys = k.load([b * k_b + (h // R) * k_rows + block * BN, (h // R) * k_cols])
        q_at = q
    else:
        k_at = k + b.to(tl.int64) * k_b + (h // R).to(tl.int64) * k_g
        k_at += cols[:, None].to(tl.int64) * k_n + dims[None, :]
        keys = tl.load(k_at, mask=(cols[:, None] < K) & (dims[None, :] < D), other=0.0)
        q_at = q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    q_row, q_col = b * q_b + h * q_rows, h * q_cols
    lse_at = lse + bh.to(tl.int64) * M
    row_at = b.to(tl.int64) * M

    # Blocks of rows: those that see some of the keys, and the run of those that see all of them
    # from further on.
    if CAUSAL:
        first, last = block * BN // BM, tl.cdiv(M, BM)
        clear, blurred = tl.minimum(tl.cdiv((block + 1) * BN, BM), last), last
    else:
        at = ranges + (b * blocks + block) * 4
        first, clear = tl.load(at), tl.load(at + 1)
        blurred, last = tl.load(at + 2), tl.load(at + 3)
    total = tl.zeros([BN, 8], tl.float32)
    entropy = tl.zeros([BN, 8], tl.float32)
    # From queries that are not after the key: in causal attention only the key's own.
    earlier = tl.zeros([BN, 8], tl.float32)
    on_self = tl.zeros([BN], tl.float32)
    spread = tl.zeros([BN, 4], tl.float32)
    for t in range(first, last - (blurred - clear)):
        m = tl.where(t < clear, t, t + blurred - clear)
        rows = m * BM + tl.arange(0, BM)
        there = tl.minimum(rows, M - 1)
        x = _look(
            keys, q_at, q_row, q_col, q_m, lse_at, m, dims, M, D, scale, cap,
            SOFTCAP, TMA, EVEN_D, EVEN_M, BM,
        )  # fmt: skip
        if CAUSAL:
            token = rows
            seen = cols[:, None] <= rows[None, :]
        else:
            token = tl.load(own + row_at + there)
            low = tl.load(start + row_at + there)
            high = tl.load(stop + row_at + there)
            seen = (cols[:, None] >= low[None, :]) & (cols[:, None] < high[None, :])
        seen = seen & (rows < M)[None, :] & (cols < K)[:, None]
        if HOLES:
            seen = seen & (tl.load(real + b * K + cols, mask=cols < K, other=0) != 0)[:, None]
        x = tl.where(seen, x, MASKED)
        p = tl.exp2(x)
        if WEIGHTED:
            p *= tl.load(weight + row_at + there)[None, :]
        total += _fold(p, BN, BM)
        entropy += _fold(p * x, BN, BM)
        earlier += _fold(tl.where(token[None, :] <= cols[:, None], p, 0.0), BN, BM)
        if not CAUSAL:
            on_self += tl.sum(tl.where(token[None, :] == cols[:, None], p, 0.0), 1)
        if PAIRED:
            spread += _gaps(p, shrink, b, m, M, BM, BN)
    # Kept in memory meanwhile: registers are what the next loop is short of.
    at = out + bh.to(tl.int64) * K + cols
    not_later = tl.sum(earlier, 1)
    tl.store(at + plane, not_later, mask=cols < K)
    mine = not_later if CAUSAL else on_self
    tl.atomic_add(scalars + 3 * bh + 2, tl.sum(mine), sem="relaxed")
    for m in range(clear, blurred):
        x = _look(
            keys, q_at, q_row, q_col, q_m, lse_at, m, dims, M, D, scale, cap,
            SOFTCAP, TMA, EVEN_D, EVEN_M, BM,
        )  # fmt: skip
        p = tl.exp2(x)
        if WEIGHTED:
            there = tl.minimum(m * BM + tl.arange(0, BM), M - 1)
            p *= tl.load(weight + row_at + there)[None, :]
        total += _fold(p, BN, BM)
        entropy += _fold(p * x, BN, BM)
        if PAIRED:
            spread += _gaps(p, shrink, b, m, M, BM, BN)
    received = tl.sum(total, 1)
    tl.debug_barrier()
    tl.store(at, received, mask=cols < K)
    before = tl.load(at + plane, mask=cols < K, other=0.0)
    tl.store(at + plane, tl.maximum(received - before, 0.0), mask=cols < K)
    if PAIRED:
        tl.store(at + 2 * plane, tl.sum(spread, 1), mask=cols < K)
    # mass and entropy: one number a head
    tl.atomic_add(scalars + 3 * bh, tl.sum(received), sem="relaxed")
    tl.atomic_add(scalars + 3 * bh + 1, -0.6931471805599453 * tl.sum(entropy), sem="relaxed")


@triton.jit
def _gaps(p, shrink, b, m, M, BM: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Squared differences between the two draws of each stratum, [BN, 4]: added up only within a
    thread."""
    pairs = m * (BM // 2) + tl.arange(0, BM // 2)
    factor = tl.load(shrink + b * (M // 2) + pairs, mask=pairs < M // 2, other=0.0)
    one, other = tl.split(tl.reshape(p, [BN, BM // 2, 2]))
    gap = (one - other) * (one - other) * factor[None, :]
    return tl.sum(tl.reshape(gap, [BN, BM // 8, 4]), 1)


@triton.jit
def _row_entropy(  # type: ignore[no-untyped-def]
    q, k, lse, start, stop, real, out, q_b, q_h, q_m, k_b, k_g, k_n, H, R, M, K, D, scale, cap,
    SOFTCAP: tl.constexpr, HOLES: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """-sum A ln A of each row over its interval, a piece of the keys at a time."""
    block, bh, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // H, bh % H
    rows = block * BM + tl.arange(0, BM)
    there = tl.minimum(rows, M - 1)
    dims = tl.arange(0, BD)
    q_at = q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    q_at += there[:, None].to(tl.int64) * q_m + dims[None, :]
    queries = tl.load(q_at, mask=(dims < D)[None, :], other=0.0)
    row_at = b.to(tl.int64) * M + there
    low, high = tl.load(start + row_at), tl.load(stop + row_at)
    given = tl.load(lse + bh.to(tl.int64) * M + there) * 1.4426950408889634
    k_at = k + b.to(tl.int64) * k_b + (h // R).to(tl.int64) * k_g + dims[:, None]
    total = tl.zeros([BM], tl.float32)
    for n in range(piece * SPLIT, tl.minimum((piece + 1) * SPLIT, tl.cdiv(K, BN))):
        cols = n * BN + tl.arange(0, BN)
        key_at = k_at + cols[None, :].to(tl.int64) * k_n
        keys = tl.load(key_at, mask=(cols[None, :] < K) & (dims[:, None] < D), other=0.0)
        x = _scores(queries, keys, scale, cap, SOFTCAP) - given[:, None]
        seen = (cols[None, :] >= low[:, None]) & (cols[None, :] < high[:, None])
        if HOLES:
            seen = seen & (tl.load(real + b * K + cols, mask=cols < K, other=0) != 0)[None, :]
        x = tl.where(seen, x, MASKED)
        total -= tl.sum(tl.exp2(x) * x, 1)
    at = out + bh.to(tl.int64) * M + rows
    tl.atomic_add(at, total * 0.6931471805599453, mask=rows < M, sem="relaxed")


@triton.jit
def _attention(  # type: ignore[no-untyped-def]
    q, k, v, start, stop, real, sinks, low_key, high_key, out, lse,
    q_b, q_h, q_m, k_b, k_g, k_n, v_b, v_g, v_n, o_b, o_h, o_m,
    H, R, M, K, D, E, scale, cap,
    SOFTCAP: tl.constexpr, HOLES: tl.constexpr, SINKS: tl.constexpr, HAS_V: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Rows of attention by online softmax: log-sum-exp and, given values, the output."""
    block, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    rows = block * BM + tl.arange(0, BM)
    there = tl.minimum(rows, M - 1)
    dims, values = tl.arange(0, BD), tl.arange(0, BE)
    q_at = q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    q_at += there[:, None].to(tl.int64) * q_m + dims[None, :]
    queries = tl.load(q_at, mask=(dims < D)[None, :], other=0.0)
    row_at = b.to(tl.int64) * M
    low, high = tl.load(start + row_at + there), tl.load(stop + row_at + there)
    k_at = k + b.to(tl.int64) * k_b + (h // R).to(tl.int64) * k_g + dims[:, None]
    v_at = v + b.to(tl.int64) * v_b + (h // R).to(tl.int64) * v_g + values[None, :]

    top = tl.full([BM], MASKED, tl.float32)
    norm = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BE], tl.float32)
    first = tl.load(low_key + b * tl.num_programs(0) + block) // BN
    last = tl.cdiv(tl.load(high_key + b * tl.num_programs(0) + block), BN)
    for n in range(first, last):
        cols = n * BN + tl.arange(0, BN)
        key_at = k_at + cols[None, :].to(tl.int64) * k_n
        keys = tl.load(key_at, mask=(cols[None, :] < K) & (dims[:, None] < D), other=0.0)
        x = _scores(queries, keys, scale, cap, SOFTCAP)
        seen = (cols[None, :] >= low[:, None]) & (cols[None, :] < high[:, None])
        if HOLES:
            seen = seen & (tl.load(real + b * K + cols, mask=cols < K, other=0) != 0)[None, :]
        x = tl.where(seen, x, 2.0 * MASKED)
        new = tl.maximum(top, tl.max(x, 1))
        shift = tl.exp2(top - new)
        p = tl.exp2(x - new[:, None])
        norm = norm * shift + tl.sum(p, 1)
        if HAS_V:
            value_at = v_at + cols[:, None].to(tl.int64) * v_n
            v_tile = tl.load(value_at, mask=(cols[:, None] < K) & (values[None, :] < E), other=0.0)
            acc = acc * shift[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        top = new
    if SINKS:
        sink = tl.load(sinks + h).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(top, sink)
        shift = tl.exp2(top - new)
        norm, acc, top = norm * shift + tl.exp2(sink - new), acc * shift[:, None], new
    safe = tl.where(norm == 0.0, 1.0, norm)
    total = tl.where(norm == 0.0, 0.0, top + tl.log2(safe))
    at = bh.to(tl.int64) * M + rows
    tl.store(lse + at, total * 0.6931471805599453, mask=rows < M)
    if HAS_V:
        o_at = out + b.to(tl.int64) * o_b + h.to(tl.int64) * o_h
        o_at += rows[:, None].to(tl.int64) * o_m + values[None, :]
        value = (acc / safe[:, None]).to(out.dtype.element_ty)
        tl.store(o_at, value, mask=(rows[:, None] < M) & (values[None, :] < E))


def reduce(rows: Rows) -> Totals:
    """All totals of these rows."""
    if rows.lse is None:
        rows = replace(rows, lse=_by_rows(rows.filled(), None)[1])
    return _reduce(rows) if rows.group is None else _reduce_groups(rows.filled())


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a call under any visibility, soft-cap and sinks included."""
    rows = Rows(
        q=call.q,
        k=call.k,
        scale=call.scale,
        start=call.visible.start,
        stop=call.visible.stop,
        real=call.visible.real,
        softcap=call.softcap,
        sinks=call.sinks,
        cache=call.visible.cache,
    )
    out, lse = _by_rows(rows, call.v)
    assert out is not None
    return out, lse


def _reduce(rows: Rows) -> Totals:
    B, H, M, D = rows.q.shape
    G, K = rows.k.shape[1:3]
    q, k = _rowwise(rows.q), _rowwise(rows.k)
    paired = rows.shrink is not None
    out = q.new_empty((3 if paired else 2, B, H, K), dtype=torch.float32)
    scalars = q.new_zeros((B, H, 3), dtype=torch.float32)
    assert rows.lse is not None
    BM, BN, options = _tile(D, q, M)
    ranges = None if rows.causal else _ranges(rows, BM, BN)
    flat_q, flat_k = _flat(q, BM, M), _flat(k, BN, M)
    if flat_q is None or flat_k is None:
        at_q, at_k = (q, q.stride(0), 0, 0), (k, k.stride(0), 0, 0)
    else:
        at_q, at_k = flat_q, flat_k
    by_head = M >= LONG
    blocks = triton.cdiv(K, BN)
    if M:
        _columns[(blocks, B * H) if by_head else (B * H, blocks)](
            at_q[0], at_k[0], rows.lse.contiguous(), rows.start, rows.stop, rows.own,
            rows.weight, rows.shrink, rows.real, ranges, out, scalars,
            at_q[1], q.stride(1), q.stride(2), at_q[2], at_q[3],
            at_k[1], k.stride(1), k.stride(2), at_k[2], at_k[3],
            H, H // G, M, K, D, B * H * K, rows.scale * LOG2E, (rows.softcap or 0.0) * LOG2E,
            CAUSAL=rows.causal, SOFTCAP=rows.softcap is not None,
            WEIGHTED=rows.weight is not None, PAIRED=paired, HOLES=rows.real is not None,
            TMA=at_q is flat_q, BM=BM, BN=BN, BD=_wide(D), EVEN_D=_wide(D) == D,
            EVEN_M=M % BM == 0, BY_HEAD=by_head, **options,
        )  # fmt: skip
    else:
        out.zero_()
    mass, entropy, own = scalars.unbind(-1)
    return Totals(
        received=out[0],
        later=out[1],
        mass=mass,
        entropy=entropy,
        own=own,
        lse=rows.lse,
        variance=out[2] if paired else None,
        entropy_variance=_entropy_variance(rows) if paired else None,
    )


def _reduce_groups(rows: Rows) -> Totals:
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
    return Totals(
        **sums,
        lse=rows.lse,
        flow=torch.stack([p.received for p in parts[1:]], 2),
        variance=None if spread is None else spread.variance,
        entropy_variance=None if spread is None else spread.entropy_variance,
    )


def _entropy_variance(rows: Rows) -> Tensor:
    """How much the entropy of the sampled rows varies within strata, from some of the strata."""
    assert rows.shrink is not None
    assert rows.lse is not None
    strata = rows.shrink.shape[1]
    pick = torch.arange(0, strata, max(1, 2 * strata // SPREAD_ROWS), device=rows.q.device)
    index = torch.stack([2 * pick, 2 * pick + 1], 1).flatten()
    q, k = rows.q[:, :, index], _rowwise(rows.k)
    B, H, M, D = q.shape
    start, stop, _ = (bound[:, index].contiguous() for bound in rows.bounds())
    entropy = q.new_zeros((B, H, M), dtype=torch.float32)
    BM, BN, options = _row_tile(_wide(D), q)
    split = max(1, triton.cdiv(k.shape[2], BN * SPLIT_KEYS))
    grid = (triton.cdiv(M, BM), B * H, triton.cdiv(k.shape[2], BN * split))
    _row_entropy[grid](
        q, k, rows.lse[:, :, index].contiguous(), start, stop, rows.real, entropy,
        q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
        H, H // k.shape[1], M, k.shape[2], D,
        rows.scale * LOG2E, (rows.softcap or 0.0) * LOG2E,
        SOFTCAP=rows.softcap is not None, HOLES=rows.real is not None, SPLIT=split,
        BM=BM, BN=BN, BD=_wide(D), **options,
    )  # fmt: skip
    if rows.weight is not None:
        entropy = entropy * rows.weight[:, None, index]
    gap = entropy[..., 0::2] - entropy[..., 1::2]
    return (gap.square() * rows.shrink[:, None, pick]).sum(-1) * (strata / len(pick))


def _by_rows(rows: Rows, v: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Log-sum-exp of each row and, given values, the output."""
    B, H, M, D = rows.q.shape
    G, K = rows.k.shape[1:3]
    q, k = _rowwise(rows.q), _rowwise(rows.k)
    values = k if v is None else _rowwise(v)
    E = values.shape[3]
    out = None if v is None else q.new_empty((B, M, H, E)).transpose(1, 2)
    lse = q.new_zeros((B, H, M), dtype=torch.float32)
    BM, BN, options = _row_tile(max(_wide(D), _wide(E)), q)
    low, high = _extent(rows, BM)
    shown = lse if out is None else out
    if M:
        _attention[(triton.cdiv(M, BM), B * H)](
            q, k, values, rows.start, rows.stop, rows.real, rows.sinks, low, high, shown, lse,
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            values.stride(0), values.stride(1), values.stride(2),
            shown.stride(0), shown.stride(1), shown.stride(2),
            H, H // G, M, K, D, E, rows.scale * LOG2E, (rows.softcap or 0.0) * LOG2E,
            SOFTCAP=rows.softcap is not None, HOLES=rows.real is not None,
            SINKS=rows.sinks is not None, HAS_V=v is not None,
            BM=BM, BN=BN, BD=_wide(D), BE=_wide(E), **options,
        )  # fmt: skip
    return out, lse


def _rowwise(tensor: Tensor) -> Tensor:
    """As it is if each row lies in one piece, which is how models hand them over."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _flat(tensor: Tensor, rows: int, queries: int) -> tuple[Any, int, int, int] | None:
    """A descriptor for the tensor copy engine, and the row of a batch item, row and column of a
    head in it; None where the engine cannot be used or would not pay."""
    B, H, N, D = tensor.shape
    if INTERPRETED or queries < LONG or tensor.element_size() != 2 or D not in (64, 128):
        return None
    if torch.cuda.get_device_capability(tensor.device) < (9, 0):
        return None
    across = tensor.stride(2)
    if tensor.stride(1) == D and across >= H * D and (B == 1 or tensor.stride(0) == N * across):
        shape, where = (B * N, H * D), (N, 0, D)  # [B, N, H, D], as models compute them
    elif tensor.is_contiguous():
        shape, where = (B * H * N, D), (H * N, N, 0)
    else:
        return None
    if tensor.data_ptr() % 16 or across % 8:
        return None
    flat = tensor.as_strided(shape, (across, 1))
    return (TensorDescriptor.from_tensor(flat, [rows, D]), *where)


def _wide(size: int) -> int:
    """What a tile's side must be: a power of two, and enough for a tensor core."""
    return max(16, int(triton.next_power_of_2(size)))


def _tile(D: int, q: Tensor, M: int) -> tuple[int, int, dict[str, int]]:
    """Queries and keys of a tile, and how to compile it: what measured fastest on an H200.

    Three programs of four warps share a multiprocessor, and take turns at the tensor cores and
    the exponential unit; that beats every explicit pipeline we tried (docs/benchmarks.md).
    """
    if INTERPRETED:
        return 32, 32, {"num_warps": 4, "num_stages": 1}
    if q.element_size() > 2:
        return 32, 64, {"num_warps": 4, "num_stages": 2}
    if D > 128:
        return 64, 64, {"num_warps": 4, "num_stages": 2}
    if M >= LONG and D in (64, 128):
        return 64, 128, {"num_warps": 4, "num_stages": 2, "maxnreg": 168}
    return 64, 128, {"num_warps": 4, "num_stages": 4}


def _row_tile(D: int, q: Tensor) -> tuple[int, int, dict[str, int]]:
    if INTERPRETED:
        return 32, 32, {"num_warps": 4, "num_stages": 1}
    if q.element_size() > 2:
        BM, BN = (64, 32) if D <= 128 else (32, 32)
        return BM, BN, {"num_warps": 4, "num_stages": 1}
    if D > 128:
        return 64, 32, {"num_warps": 4, "num_stages": 2}
    return 128, 64, {"num_warps": 8, "num_stages": 3}


def _blocks(tensor: Tensor, size: int, fill: int) -> Tensor:
    """[B, M] as [B, blocks, size], the last block filled up."""
    B, M = tensor.shape
    short = triton.cdiv(M, size) * size - M
    return torch.nn.functional.pad(tensor, (0, short), value=fill).view(B, -1, size)


def _extent(rows: Rows, BM: int) -> tuple[Tensor, Tensor]:
    """For each block of rows: first and one past last key that any of them sees, int32 [B, blocks].

    Layers under one mask share it.
    """
    if ("extent", BM) not in rows.cache:
        start, stop = rows.start, rows.stop
        assert start is not None
        assert stop is not None
        sees = stop > start
        low = _blocks(torch.where(sees, start, FAR), BM, FAR).amin(2)
        high = _blocks(torch.where(sees, stop, 0), BM, 0).amax(2)
        rows.cache["extent", BM] = (torch.minimum(low, high).int(), high.int())
    low, high = rows.cache["extent", BM]
    return low, high


def _ranges(rows: Rows, BM: int, BN: int) -> Tensor:
    """For each block of keys, int32 [B, blocks, 4]: the first block of rows that sees any of
    them, the run of those whose rows all see all of them from further on, and one past the last.
    """
    if ("ranges", BM, BN) not in rows.cache:
        start, stop, own = rows.bounds()
        low, high = (bound[:, None] for bound in _extent(rows, BM))
        left = torch.arange(0, rows.k.shape[2], BN, device=low.device)[:, None]
        right = left + BN
        meet = (low < right) & (high > left) & (high > low)
        order = torch.arange(meet.shape[2], device=low.device)
        first = torch.where(meet, order, meet.shape[2]).amin(2)
        last = torch.where(meet, order + 1, 0).amax(2)
        latest = _blocks(start, BM, FAR).amax(2)[:, None]
        soonest = torch.minimum(_blocks(stop, BM, 0).amin(2), _blocks(own, BM, 0).amin(2))[:, None]
        whole = (latest <= left) & (soonest >= right) & (rows.real is None)
        clear = torch.where(whole, order, FAR).amin(2)
        clear = torch.minimum(torch.maximum(clear, first), last)
        broken = ~whole & (order >= clear[..., None])
        blurred = torch.where(broken, order, FAR).amin(2)
        blurred = torch.maximum(torch.minimum(blurred, last), clear)
        last = torch.maximum(last, first)
        rows.cache["ranges", BM, BN] = torch.stack([first, clear, blurred, last], 2).int()
    ranges: Tensor = rows.cache["ranges", BM, BN]
    return ranges.contiguous()
