"""The streamed kernels in Triton, for CUDA: column sums of A, and attention row by row.

Three layers: the jit functions, which know tiles; the launchers, which know tensors; and `reduce`
and `attend`, which know the definitions. Scores are in units of log2 throughout.

A column program holds one block of keys and runs over the queries that see it. It computes the
transposed scores (keys × queries), so that a key's sum stays inside a few threads.
"""

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscope.kernels.call import AttentionCall, Rows, Totals

__all__ = ["attend", "reduce"]

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# A log-sum-exp no score reaches: its row gets weight 0, and 0 times its score is 0, not nan.
NOBODY = tl.constexpr(1.0e30)
MASKED = tl.constexpr(-1.0e4)
# Sampled rows whose own entropy is looked at, to tell how much entropy varies between rows.
SPREAD_ROWS = 512


@triton.jit
def _scores(a, b, scale, cap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.dot(a, b, input_precision="ieee") * scale
    if SOFTCAP:
        # tanh(y) = 1 - 2 / (exp(2 y) + 1)
        y = tl.exp2(x * (2.0 * 1.4426950408889634) / cap)
        x = cap - 2.0 * cap / (y + 1.0)
    return x


@triton.jit
def _columns(  # type: ignore[no-untyped-def]
    q, k, lse, start, stop, own, weight, shrink, real, first_block, last_block,
    received, later, variance, scalars,
    q_b, q_h, q_m, k_b, k_g, k_n,
    H, R, M, K, D, scale, cap,
    CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, WEIGHTED: tl.constexpr, PAIRED: tl.constexpr,
    HOLES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    EVEN_D: tl.constexpr,
):  # fmt: skip
    block, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    cols = block * BN + tl.arange(0, BN)
    dims = tl.arange(0, BD)
    k_at = k + b.to(tl.int64) * k_b + (h // R).to(tl.int64) * k_g
    k_at += cols[:, None].to(tl.int64) * k_n + dims[None, :]
    inside = (cols[:, None] < K) & (dims[None, :] < D)
    keys = tl.load(k_at, mask=inside, other=0.0)
    q_at = q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + dims[:, None]
    lse_at = lse + bh.to(tl.int64) * M
    row_at = b.to(tl.int64) * M

    total = tl.zeros([BN], tl.float32)
    total_later = tl.zeros([BN], tl.float32)
    spread = tl.zeros([BN], tl.float32)
    entropy = tl.zeros([BN], tl.float32)
    on_self = tl.zeros([BN], tl.float32)
    if CAUSAL:
        first = block * BN // BM
        last = tl.minimum(tl.cdiv((block + 1) * BN, BM), tl.cdiv(M, BM))
    else:
        first = tl.load(first_block + b * tl.num_programs(0) + block)
        last = tl.load(last_block + b * tl.num_programs(0) + block)
    for m in range(first, last):
        rows = m * BM + tl.arange(0, BM)
        there = tl.minimum(rows, M - 1)
        queries = _load_queries(q_at, there, q_m, dims, D, EVEN_D)
        x = _scores(keys, queries, scale, cap, SOFTCAP)
        given = tl.load(lse_at + rows, mask=rows < M, other=NOBODY) * 1.4426950408889634
        x -= given[None, :]
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
        total += tl.sum(p, 1)
        entropy += tl.sum(p * x, 1)
        total_later += tl.sum(tl.where(token[None, :] > cols[:, None], p, 0.0), 1)
        on_self += tl.sum(tl.where(token[None, :] == cols[:, None], p, 0.0), 1)
        if PAIRED:
            pairs = m * (BM // 2) + tl.arange(0, BM // 2)
            factor = tl.load(shrink + b * (M // 2) + pairs, mask=pairs < M // 2, other=0.0)
            one, other = tl.split(tl.reshape(p, [BN, BM // 2, 2]))
            spread += tl.sum((one - other) * (one - other) * factor[None, :], 1)
    if CAUSAL:  # every query from here on sees every key of the block
        for m in range(last, tl.cdiv(M, BM)):
            rows = m * BM + tl.arange(0, BM)
            there = tl.minimum(rows, M - 1)
            queries = _load_queries(q_at, there, q_m, dims, D, EVEN_D)
            x = _scores(keys, queries, scale, cap, SOFTCAP)
            given = tl.load(lse_at + rows, mask=rows < M, other=NOBODY) * 1.4426950408889634
            x -= given[None, :]
            p = tl.exp2(x)
            part = tl.sum(p, 1)
            total += part
            total_later += part
            entropy += tl.sum(p * x, 1)
    out = bh.to(tl.int64) * K + cols
    tl.store(received + out, total, mask=cols < K)
    tl.store(later + out, total_later, mask=cols < K)
    if PAIRED:
        tl.store(variance + out, spread, mask=cols < K)
    # mass, entropy and self mass are one number a head
    tl.atomic_add(scalars + 3 * bh, tl.sum(tl.where(cols < K, total, 0.0)), sem="relaxed")
    tl.atomic_add(scalars + 3 * bh + 1, tl.sum(entropy), sem="relaxed")
    tl.atomic_add(scalars + 3 * bh + 2, tl.sum(on_self), sem="relaxed")


@triton.jit
def _load_queries(q_at, rows, q_m, dims, D, EVEN_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Queries as columns, [BD, BM]."""
    at = q_at + rows[None, :].to(tl.int64) * q_m
    if EVEN_D:
        return tl.load(at)
    return tl.load(at, mask=(dims < D)[:, None], other=0.0)


@triton.jit
def _attention(  # type: ignore[no-untyped-def]
    q, k, v, start, stop, real, sinks, low_key, high_key, out, lse, entropy,
    q_b, q_h, q_m, k_b, k_g, k_n, v_b, v_g, v_n, o_b, o_h, o_m,
    H, R, M, K, D, E, scale, cap,
    SOFTCAP: tl.constexpr, HOLES: tl.constexpr, SINKS: tl.constexpr, HAS_V: tl.constexpr,
    ENTROPY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Rows of attention by online softmax: output, log-sum-exp and entropy, as asked for."""
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
    product = tl.zeros([BM], tl.float32)
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
        if ENTROPY:
            product = product * shift + tl.sum(p * x, 1)
        if HAS_V:
            value_at = v_at + cols[:, None].to(tl.int64) * v_n
            v_tile = tl.load(value_at, mask=(cols[:, None] < K) & (values[None, :] < E), other=0.0)
            acc = acc * shift[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        top = new
    of_keys = norm
    if SINKS:
        sink = tl.load(sinks + h).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(top, sink)
        shift = tl.exp2(top - new)
        of_keys, product, acc = of_keys * shift, product * shift, acc * shift[:, None]
        norm, top = of_keys + tl.exp2(sink - new), new
    safe = tl.where(norm == 0.0, 1.0, norm)
    total = tl.where(norm == 0.0, 0.0, top + tl.log2(safe))
    at = bh.to(tl.int64) * M + rows
    tl.store(lse + at, total * 0.6931471805599453, mask=rows < M)
    if ENTROPY:  # -sum A log2 A, where A = exp2(x - total)
        value = (total * of_keys - product) / safe
        tl.store(entropy + at, value * 0.6931471805599453, mask=rows < M)
    if HAS_V:
        o_at = out + b.to(tl.int64) * o_b + h.to(tl.int64) * o_h
        o_at += rows[:, None].to(tl.int64) * o_m + values[None, :]
        value = (acc / safe[:, None]).to(out.dtype.element_ty)
        tl.store(o_at, value, mask=(rows[:, None] < M) & (values[None, :] < E))


def reduce(rows: Rows) -> Totals:
    """All totals of these rows."""
    if rows.lse is None:
        rows = replace(rows, lse=_by_rows(rows)[1])
    return _reduce(rows) if rows.group is None else _reduce_groups(rows)


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a call under any visibility, soft-cap and sinks included."""
    visible = call.visible
    rows = Rows(
        q=call.q,
        k=call.k,
        scale=call.scale,
        start=visible.start,
        stop=visible.stop,
        own=visible.start,
        real=visible.real,
        softcap=call.softcap,
        sinks=call.sinks,
        cache=visible.cache,
    )
    out, lse, _ = _by_rows(rows, call.v)
    assert out is not None
    return out, lse


def _reduce_groups(rows: Rows) -> Totals:
    """Each group of queries by itself, gathered, so that together they cost what all cost."""
    assert rows.group is not None
    parts = []
    B, H, M, D = rows.q.shape
    for c in (-1, *range(rows.groups)):
        member = rows.group == c
        width = int(member.sum(1).max())
        index = torch.argsort(~member, dim=1, stable=True)[:, : max(width, 1)]
        weight = member.gather(1, index).float()
        if rows.weight is not None:
            weight *= rows.weight.gather(1, index)
        wide = index[:, None].expand(B, H, -1)
        assert rows.lse is not None
        parts.append(
            _reduce(
                replace(
                    rows,
                    q=rows.q.gather(2, wide[..., None].expand(-1, -1, -1, D)),
                    lse=rows.lse.gather(2, wide),
                    start=rows.start.gather(1, index),
                    stop=rows.stop.gather(1, index),
                    own=rows.own.gather(1, index),
                    causal=False,
                    weight=weight,
                    shrink=None,
                    group=None,
                    cache={},
                )
            )
        )
    names = ("received", "later", "mass", "entropy", "own")
    sums = {name: torch.stack([getattr(p, name) for p in parts]).sum(0) for name in names}
    variance = _reduce(replace(rows, group=None)) if rows.shrink is not None else None
    return Totals(
        **sums,
        lse=rows.lse,  # type: ignore[arg-type]
        flow=torch.stack([p.received for p in parts[1:]], 2),
        variance=None if variance is None else variance.variance,
        entropy_variance=None if variance is None else variance.entropy_variance,
    )


def _reduce(rows: Rows) -> Totals:
    B, H, M, D = rows.q.shape
    G, K = rows.k.shape[1:3]
    q, k = _rowwise(rows.q), _rowwise(rows.k)
    new = q.new_empty
    received, later = new((2, B, H, K), dtype=torch.float32)
    scalars = q.new_zeros((B, H, 3), dtype=torch.float32)
    paired = rows.shrink is not None
    variance = new((B, H, K), dtype=torch.float32) if paired else None
    BM, BN, warps, stages = _tile(D, q)
    first, last = (None, None) if rows.causal else _overlap(rows, BM, BN)
    assert rows.lse is not None
    if M and K:
        _columns[(triton.cdiv(K, BN), B * H)](
            q, k, rows.lse.contiguous(), rows.start, rows.stop, rows.own,
            rows.weight, rows.shrink, rows.real, first, last,
            received, later, variance, scalars,
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            H, H // G, M, K, D, rows.scale * LOG2E, (rows.softcap or 0.0) * LOG2E,
            CAUSAL=rows.causal, SOFTCAP=rows.softcap is not None,
            WEIGHTED=rows.weight is not None, PAIRED=paired, HOLES=rows.real is not None,
            BM=BM, BN=BN, BD=_wide(D), EVEN_D=_wide(D) == D,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    else:
        received, later = received.zero_(), later.zero_()
    return Totals(
        received=received,
        later=later,
        mass=scalars[..., 0],
        entropy=scalars[..., 1] * -LN2,
        own=scalars[..., 2],
        lse=rows.lse,
        variance=variance,
        entropy_variance=_entropy_variance(rows) if paired else None,
    )


def _entropy_variance(rows: Rows) -> Tensor:
    """How much the entropy of the sampled rows varies within strata, from some of the strata."""
    assert rows.shrink is not None
    assert rows.lse is not None
    strata = rows.shrink.shape[1]
    step = max(1, 2 * strata // SPREAD_ROWS)
    pick = torch.arange(0, strata, step, device=rows.q.device)
    index = torch.stack([2 * pick, 2 * pick + 1], 1).flatten()
    some = replace(
        rows,
        q=rows.q[:, :, index],
        lse=rows.lse[:, :, index],
        start=rows.start[:, index].contiguous(),
        stop=rows.stop[:, index].contiguous(),
        cache={},
    )
    _, lse, entropy = _by_rows(some, entropy=True)
    # Over part of a row A is smaller by the share of the part: -sum A ln A changes with it.
    assert some.lse is not None
    share = torch.exp(lse - some.lse) * (some.stop > some.start)[:, None]
    entropy = share * entropy - share * (lse - some.lse)
    if rows.weight is not None:
        entropy = entropy * rows.weight[:, None, index]
    gap = entropy[..., 0::2] - entropy[..., 1::2]
    return (gap.square() * rows.shrink[:, None, pick]).sum(-1) * (strata / len(pick))


def _by_rows(
    rows: Rows, v: Tensor | None = None, *, entropy: bool = False
) -> tuple[Tensor | None, Tensor, Tensor]:
    B, H, M, D = rows.q.shape
    G, K = rows.k.shape[1:3]
    q, k = _rowwise(rows.q), _rowwise(rows.k)
    values = k if v is None else _rowwise(v)
    E = values.shape[3]
    out = None if v is None else q.new_empty((B, M, H, E)).transpose(1, 2)
    lse = q.new_zeros((B, H, M), dtype=torch.float32)
    spread = torch.empty_like(lse) if entropy else lse
    BD, BE = _wide(D), _wide(E)
    BM, BN, warps, stages = _row_tile(max(BD, BE), q)
    low, high = _extent(rows, BM)
    shown = lse if out is None else out
    if M:
        _attention[(triton.cdiv(M, BM), B * H)](
            q, k, values, rows.start, rows.stop, rows.real, rows.sinks, low, high,
            shown, lse, spread,
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            values.stride(0), values.stride(1), values.stride(2),
            shown.stride(0), shown.stride(1), shown.stride(2),
            H, H // G, M, K, D, E, rows.scale * LOG2E, (rows.softcap or 0.0) * LOG2E,
            SOFTCAP=rows.softcap is not None, HOLES=rows.real is not None,
            SINKS=rows.sinks is not None, HAS_V=v is not None, ENTROPY=entropy,
            BM=BM, BN=BN, BD=BD, BE=BE, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, lse, spread


def _rowwise(tensor: Tensor) -> Tensor:
    """As it is if each row lies in one piece, which is how models hand them over."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _wide(size: int) -> int:
    """What a tile's side must be: a power of two, and enough for a tensor core."""
    return max(16, int(triton.next_power_of_2(size)))


def _interpreted() -> bool:
    return triton.knobs.runtime.interpret


def _tile(D: int, q: Tensor) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps, stages: what measured fastest (docs/benchmarks.md)."""
    if _interpreted():
        return 32, 32, 4, 1
    if q.element_size() > 2:
        return 64, 64, 4, 2
    if D <= 64:
        return 128, 128, 8, 3
    return (64, 128, 8, 3) if D <= 128 else (64, 64, 8, 2)


def _row_tile(D: int, q: Tensor) -> tuple[int, int, int, int]:
    if _interpreted():
        return 32, 32, 4, 1
    if q.element_size() > 2:
        return (64, 32, 4, 2) if D <= 128 else (32, 32, 4, 1)
    return (128, 64, 8, 3) if D <= 128 else (64, 32, 4, 2)


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
        sees = rows.stop > rows.start
        far = torch.iinfo(torch.int32).max
        low = _blocks(torch.where(sees, rows.start, far), BM, far).amin(2)
        high = _blocks(torch.where(sees, rows.stop, 0), BM, 0).amax(2)
        rows.cache["extent", BM] = (torch.minimum(low, high).int(), high.int())
    low, high = rows.cache["extent", BM]
    return low, high


def _overlap(rows: Rows, BM: int, BN: int) -> tuple[Tensor, Tensor]:
    """For each block of keys: first and one past last block of rows that sees any of them."""
    if ("overlap", BM, BN) not in rows.cache:
        low, high = _extent(rows, BM)
        edges = torch.arange(0, rows.k.shape[2], BN, device=low.device)[:, None]
        meet = (low[:, None] < edges + BN) & (high[:, None] > edges) & (high > low)[:, None]
        order = torch.arange(meet.shape[2], device=low.device)
        first = torch.where(meet, order, meet.shape[2]).amin(2).int()
        last = torch.where(meet, order + 1, 0).amax(2).int()
        rows.cache["overlap", BM, BN] = (first.contiguous(), last.contiguous())
    first, last = rows.cache["overlap", BM, BN]
    return first, last
