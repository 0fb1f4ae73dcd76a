"""The tiles: what runs on the GPU. `triton.py` launches them; they get pointers, not tensors.

A column program holds one block of keys and runs over the queries that see it. It computes the
transposed scores (keys × queries), so that a key's sum stays inside a few threads. Scores are in
units of log2 throughout.
"""

import triton
import triton.language as tl

# A log-sum-exp no score reaches: its row gets weight 0, and 0 times its score is 0, not nan.
LSE_INF = tl.constexpr(1.0e30)
MASKED = tl.constexpr(-1.0e4)
# Weights times 2 ** UP are at most 16384, and keep 22 bits in two float16 numbers.
SCALE_LOG2 = tl.constexpr(14.0)
# Below any score, where the log-sum-exp has not been taken off yet. `triton.py` has it too.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _scores(a, b, scale, cap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.dot(a, b, input_precision="ieee") * scale
    if SOFTCAP:
        # tanh(y) = 1 - 2 / (exp(2 y) + 1)
        y = tl.exp2(x * (2.0 * 1.4426950408889634) / cap)
        x = cap - 2.0 * cap / (y + 1.0)
    return x


@triton.jit
def _log_weights(  # type: ignore[no-untyped-def]
    keys, q, q_row, q_col, q_m, lse_at, m, dims, M, D, scale, cap,
    SOFTCAP: tl.constexpr, TMA: tl.constexpr, EVEN_D: tl.constexpr, EVEN_M: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """log2 A of one tile, keys × queries, before the mask, and the scores; rows past the end get
    weight 0."""
    rows = m * BM + tl.arange(0, BM)
    if TMA:
        queries = q.load([q_row + m * BM, q_col]).T
    else:
        row_index = rows if EVEN_M else tl.minimum(rows, M - 1)
        at = q + row_index[None, :].to(tl.int64) * q_m + dims[:, None]
        queries = tl.load(at) if EVEN_D else tl.load(at, mask=(dims < D)[:, None], other=0.0)
    x = _scores(keys, queries, scale, cap, SOFTCAP)
    if EVEN_M:
        lse_tile = tl.load(lse_at + rows)
    else:
        lse_tile = tl.load(lse_at + rows, mask=rows < M, other=LSE_INF)
    return x - lse_tile[None, :] * 1.4426950408889634, x


@triton.jit
def _thread_max(x, N: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `_thread_sum`, for the largest."""
    return tl.max(tl.reshape(x, [N, M // 8, 8]), 1)


@triton.jit
def _thread_sum(x, N: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """[N, M] to [N, 8], adding up only what one thread holds: no exchange between threads."""
    return tl.sum(tl.reshape(x, [N, M // 8, 8]), 1)


@triton.jit
def columns(  # type: ignore[no-untyped-def]
    q, k, lse, start, stop, self_key, weight, fpc, real, row_ranges, out, scalars,
    q_b, q_h, q_m, q_rows, q_cols, k_b, k_g, k_n, k_rows, k_cols,
    H, R, M, K, D, diagonal_offset, batch, lse_h, plane, scale, cap,
    TRIANGULAR: tl.constexpr, SOFTCAP: tl.constexpr, WEIGHTED: tl.constexpr, PAIRED: tl.constexpr,
    HOLES: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_M: tl.constexpr, BY_HEAD: tl.constexpr,
    TYPE: tl.constexpr, MAX_LOGIT: tl.constexpr,
):  # fmt: skip
    """Column sums of A: one block of keys, all the queries that see it.

    With a `TYPE`, q, k and lse are tables of addresses: the tensors of that type of several layers,
    each of `batch` sequences, under the same bounds.
    """
    if BY_HEAD:  # a long text: one head's queries at a time stay in the second-level cache
        block, bh, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
        heads = tl.num_programs(1)
    else:  # a short one: the early keys, which most queries see, start first
        bh, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
        heads = tl.num_programs(0)
    b, h = bh // H, bh % H
    if TYPE is not None:
        layer, b = b // batch, b % batch
        q = tl.multiple_of(tl.load(q + layer).to(tl.pointer_type(TYPE)), 16)
        k = tl.multiple_of(tl.load(k + layer).to(tl.pointer_type(TYPE)), 16)
        lse = tl.load(lse + layer).to(tl.pointer_type(tl.float32))
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
    lse_at = lse + (b * H + h).to(tl.int64) * lse_h
    row_at = b.to(tl.int64) * M

    # Blocks of rows: those that see some of the keys, and the run of those that see all of them
    # from further on.
    if TRIANGULAR:
        first, last = tl.maximum(block * BN - diagonal_offset, 0) // BM, tl.cdiv(M, BM)
        unmasked_start = tl.minimum(
            tl.cdiv(tl.maximum((block + 1) * BN - diagonal_offset, 0), BM), last
        )
        unmasked_end = last
    else:
        at = row_ranges + (b * blocks + block) * 4
        first, unmasked_start = tl.load(at), tl.load(at + 1)
        unmasked_end, last = tl.load(at + 2), tl.load(at + 3)
    total = tl.zeros([BN, 8], tl.float32)
    entropy = tl.zeros([BN, 8], tl.float32)
    # From queries that are not after the key: in causal attention only the key's own.
    not_later = tl.zeros([BN, 8], tl.float32)
    on_self = tl.zeros([BN], tl.float32)
    spread = tl.zeros([BN, 4], tl.float32)
    most = tl.full([BN, 8], LOWEST, tl.float32)
    for t in range(first, last - (unmasked_end - unmasked_start)):
        m = tl.where(t < unmasked_start, t, t + unmasked_end - unmasked_start)
        rows = m * BM + tl.arange(0, BM)
        row_index = tl.minimum(rows, M - 1)
        x, score = _log_weights(
            keys, q_at, q_row, q_col, q_m, lse_at, m, dims, M, D, scale, cap,
            SOFTCAP, TMA, EVEN_D, EVEN_M, BM,
        )  # fmt: skip
        if TRIANGULAR:
            token = rows + diagonal_offset
            mask = cols[:, None] <= token[None, :]
        else:
            token = tl.load(self_key + row_at + row_index)
            low = tl.load(start + row_at + row_index)
            high = tl.load(stop + row_at + row_index)
            mask = (cols[:, None] >= low[None, :]) & (cols[:, None] < high[None, :])
        mask = mask & (rows < M)[None, :] & (cols < K)[:, None]
        if HOLES:
            mask = mask & (tl.load(real + b * K + cols, mask=cols < K, other=0) != 0)[:, None]
        x = tl.where(mask, x, MASKED)
        if MAX_LOGIT:
            most = tl.maximum(most, _thread_max(tl.where(mask, score, LOWEST), BN, BM))
        p = tl.exp2(x)
        if WEIGHTED:
            p *= tl.load(weight + row_at + row_index)[None, :]
        total += _thread_sum(p, BN, BM)
        entropy += _thread_sum(p * x, BN, BM)
        not_later += _thread_sum(tl.where(token[None, :] <= cols[:, None], p, 0.0), BN, BM)
        if not TRIANGULAR:
            on_self += tl.sum(tl.where(token[None, :] == cols[:, None], p, 0.0), 1)
        if PAIRED:
            spread += _pair_variance(p, fpc, b, m, M, BM, BN)
    # Kept in memory meanwhile: registers are what the next loop is short of.
    at = out + bh.to(tl.int64) * K + cols
    not_later_sum = tl.sum(not_later, 1)
    tl.store(at + plane, not_later_sum, mask=cols < K)
    mine = not_later_sum if TRIANGULAR else on_self
    # One number a head and block, which the launcher adds up: atomics have no fixed order.
    scalar = scalars + (4 if MAX_LOGIT else 3) * (block * heads + bh)
    tl.store(scalar + 2, tl.sum(mine))
    for m in range(unmasked_start, unmasked_end):
        x, score = _log_weights(
            keys, q_at, q_row, q_col, q_m, lse_at, m, dims, M, D, scale, cap,
            SOFTCAP, TMA, EVEN_D, EVEN_M, BM,
        )  # fmt: skip
        if MAX_LOGIT:
            if not EVEN_M:  # rows past the end may be those of another head
                score = tl.where((m * BM + tl.arange(0, BM) < M)[None, :], score, LOWEST)
            most = tl.maximum(most, _thread_max(score, BN, BM))
        p = tl.exp2(x)
        if WEIGHTED:
            row_index = tl.minimum(m * BM + tl.arange(0, BM), M - 1)
            p *= tl.load(weight + row_at + row_index)[None, :]
        total += _thread_sum(p, BN, BM)
        entropy += _thread_sum(p * x, BN, BM)
        if PAIRED:
            spread += _pair_variance(p, fpc, b, m, M, BM, BN)
    received = tl.sum(total, 1)
    tl.debug_barrier()
    tl.store(at, received, mask=cols < K)
    before = tl.load(at + plane, mask=cols < K, other=0.0)
    tl.store(at + plane, tl.maximum(received - before, 0.0), mask=cols < K)
    if PAIRED:
        tl.store(at + 2 * plane, tl.sum(spread, 1), mask=cols < K)
    # mass and entropy
    tl.store(scalar, tl.sum(received))
    tl.store(scalar + 1, -0.6931471805599453 * tl.sum(entropy))
    if MAX_LOGIT:
        tl.store(scalar + 3, tl.max(most))


@triton.jit
def _pair_variance(p, fpc, b, m, M, BM: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Squared differences between the two draws of each stratum, [BN, 4]: added up only within a
    thread."""
    pairs = m * (BM // 2) + tl.arange(0, BM // 2)
    factor = tl.load(fpc + b * (M // 2) + pairs, mask=pairs < M // 2, other=0.0)
    one, other = tl.split(tl.reshape(p, [BN, BM // 2, 2]))
    gap = (one - other) * (one - other) * factor[None, :]
    return tl.sum(tl.reshape(gap, [BN, BM // 8, 4]), 1)


@triton.jit
def row_entropy(  # type: ignore[no-untyped-def]
    q, k, lse, start, stop, real, out, q_b, q_h, q_m, k_b, k_g, k_n, H, R, M, K, D, scale, cap,
    SOFTCAP: tl.constexpr, HOLES: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """-sum A ln A of each row over its interval, a piece of the keys at a time."""
    block, bh, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // H, bh % H
    rows = block * BM + tl.arange(0, BM)
    row_index = tl.minimum(rows, M - 1)
    dims = tl.arange(0, BD)
    q_at = q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    q_at += row_index[:, None].to(tl.int64) * q_m + dims[None, :]
    queries = tl.load(q_at, mask=(dims < D)[None, :], other=0.0)
    row_at = b.to(tl.int64) * M + row_index
    low, high = tl.load(start + row_at), tl.load(stop + row_at)
    lse_tile = tl.load(lse + bh.to(tl.int64) * M + row_index) * 1.4426950408889634
    k_at = k + b.to(tl.int64) * k_b + (h // R).to(tl.int64) * k_g + dims[:, None]
    total = tl.zeros([BM], tl.float32)
    for n in range(piece * SPLIT, tl.minimum((piece + 1) * SPLIT, tl.cdiv(K, BN))):
        cols = n * BN + tl.arange(0, BN)
        key_at = k_at + cols[None, :].to(tl.int64) * k_n
        keys = tl.load(key_at, mask=(cols[None, :] < K) & (dims[:, None] < D), other=0.0)
        x = _scores(queries, keys, scale, cap, SOFTCAP) - lse_tile[:, None]
        mask = (cols[None, :] >= low[:, None]) & (cols[None, :] < high[:, None])
        if HOLES:
            mask = mask & (tl.load(real + b * K + cols, mask=cols < K, other=0) != 0)[None, :]
        x = tl.where(mask, x, MASKED)
        total -= tl.sum(tl.exp2(x) * x, 1)
    at = out + (piece * tl.num_programs(1) + bh).to(tl.int64) * M + rows
    tl.store(at, total * 0.6931471805599453, mask=rows < M)


@triton.jit
def _add_score_bias(  # type: ignore[no-untyped-def]
    x, biases, biased_rows, b, h, H, rows, cols, M, K, BIASES: tl.constexpr
):  # fmt: skip
    """Scores of a tile with what links add to them: links [LINKS, B, H, K], the rows that each
    means [LINKS, B, M]."""
    for n in tl.static_range(BIASES):
        at = (n * (tl.num_programs(1) // H) + b).to(tl.int64)
        bias = tl.load(biases + (at * H + h) * K + cols, mask=cols < K, other=0.0)
        meant = tl.load(biased_rows + at * M + rows) != 0
        x += tl.where(meant[:, None], bias[None, :] * 1.4426950408889634, 0.0)
    return x


@triton.jit
def _add_masses(acc, x, shares, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights 2 ** x [BM, BN] times the shares of their keys [BN, BE], added up. Tensor cores take
    16 bits, so a weight goes in twice: as far as these reach, and what is left."""
    p = tl.exp2(x + SCALE_LOG2)
    if EXACT:
        acc += tl.dot(p, shares, input_precision="ieee")
    else:  # not after a return: what follows one is compiled all the same
        most = p.to(tl.float16)
        acc = tl.dot(most, shares, acc)
        acc = tl.dot((p - most.to(tl.float32)).to(tl.float16), shares, acc)
    return acc


@triton.jit
def row_masses(  # type: ignore[no-untyped-def]
    q, k, lse, shares, start, stop, real, low_key, high_key, out,
    q_b, q_h, q_m, k_b, k_g, k_n, H, R, M, K, D, scale, cap,
    SOFTCAP: tl.constexpr, HOLES: tl.constexpr, EXACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """A times the shares of the keys [B, K, BE]: one block of rows, all the keys it sees."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # late rows see most: they start first
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    rows = block * BM + tl.arange(0, BM)
    row_index = tl.minimum(rows, M - 1)
    dims, classes = tl.arange(0, BD), tl.arange(0, BE)
    q_at = q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    q_at += row_index[:, None].to(tl.int64) * q_m + dims[None, :]
    queries = tl.load(q_at, mask=(dims < D)[None, :], other=0.0)
    row_at = b.to(tl.int64) * M + row_index
    low, high = tl.load(start + row_at), tl.load(stop + row_at)
    lse_tile = tl.load(lse + bh.to(tl.int64) * M + row_index)[:, None] * 1.4426950408889634
    k_at = k + b.to(tl.int64) * k_b + (h // R).to(tl.int64) * k_g + dims[:, None]
    shares_at = shares + b.to(tl.int64) * K * BE + classes[None, :]
    # Blocks of keys: those that some row sees, and the run of those that all rows see whole.
    extent = b * tl.num_programs(0) + block
    first, last = tl.load(low_key + extent) // BN, tl.cdiv(tl.load(high_key + extent), BN)
    unmasked_start, unmasked_end = last, last
    if not HOLES:
        unmasked_start = tl.minimum(tl.maximum(tl.cdiv(tl.max(low, 0), BN), first), last)
        unmasked_end = tl.maximum(tl.minimum(tl.min(high, 0) // BN, last), unmasked_start)
    acc = tl.zeros([BM, BE], tl.float32)
    for t in range(first, last - (unmasked_end - unmasked_start)):
        n = tl.where(t < unmasked_start, t, t + unmasked_end - unmasked_start)
        cols = n * BN + tl.arange(0, BN)
        key_at = k_at + cols[None, :].to(tl.int64) * k_n
        keys = tl.load(key_at, mask=(cols[None, :] < K) & (dims[:, None] < D), other=0.0)
        x = _scores(queries, keys, scale, cap, SOFTCAP) - lse_tile
        mask = (cols[None, :] >= low[:, None]) & (cols[None, :] < high[:, None])
        if HOLES:
            mask = mask & (tl.load(real + b * K + cols, mask=cols < K, other=0) != 0)[None, :]
        mine = tl.load(shares_at + cols[:, None] * BE, mask=cols[:, None] < K, other=0.0)
        acc = _add_masses(acc, tl.where(mask, x, MASKED), mine, EXACT)
    for n in range(unmasked_start, unmasked_end):
        cols = n * BN + tl.arange(0, BN)
        key_at = k_at + cols[None, :].to(tl.int64) * k_n
        keys = tl.load(key_at, mask=dims[:, None] < D, other=0.0)
        x = _scores(queries, keys, scale, cap, SOFTCAP) - lse_tile
        acc = _add_masses(acc, x, tl.load(shares_at + cols[:, None] * BE), EXACT)
    at = out + (bh.to(tl.int64) * M + rows[:, None]) * BE + classes[None, :]
    tl.store(at, acc * (1.0 / 16384.0), mask=(rows < M)[:, None])


@triton.jit
def attention(  # type: ignore[no-untyped-def]
    q, k, v, start, stop, real, sinks, biases, biased_rows, low_key, high_key, out, lse,
    q_b, q_h, q_m, k_b, k_g, k_n, v_b, v_g, v_n, o_b, o_h, o_m,
    H, R, M, K, D, E, scale, cap,
    SOFTCAP: tl.constexpr, HOLES: tl.constexpr, SINKS: tl.constexpr, HAS_V: tl.constexpr,
    BIASES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Rows of attention by online softmax: log-sum-exp and, given values, the output."""
    block, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    rows = block * BM + tl.arange(0, BM)
    row_index = tl.minimum(rows, M - 1)
    dims, values = tl.arange(0, BD), tl.arange(0, BE)
    q_at = q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h
    q_at += row_index[:, None].to(tl.int64) * q_m + dims[None, :]
    queries = tl.load(q_at, mask=(dims < D)[None, :], other=0.0)
    row_at = b.to(tl.int64) * M
    low, high = tl.load(start + row_at + row_index), tl.load(stop + row_at + row_index)
    k_at = k + b.to(tl.int64) * k_b + (h // R).to(tl.int64) * k_g + dims[:, None]
    v_at = v + b.to(tl.int64) * v_b + (h // R).to(tl.int64) * v_g + values[None, :]

    top = tl.full([BM], LOWEST, tl.float32)
    norm = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BE], tl.float32)
    first = tl.load(low_key + b * tl.num_programs(0) + block) // BN
    last = tl.cdiv(tl.load(high_key + b * tl.num_programs(0) + block), BN)
    for n in range(first, last):
        cols = n * BN + tl.arange(0, BN)
        key_at = k_at + cols[None, :].to(tl.int64) * k_n
        keys = tl.load(key_at, mask=(cols[None, :] < K) & (dims[:, None] < D), other=0.0)
        x = _scores(queries, keys, scale, cap, SOFTCAP)
        if BIASES:
            x = _add_score_bias(x, biases, biased_rows, b, h, H, row_index, cols, M, K, BIASES)
        mask = (cols[None, :] >= low[:, None]) & (cols[None, :] < high[:, None])
        if HOLES:
            mask = mask & (tl.load(real + b * K + cols, mask=cols < K, other=0) != 0)[None, :]
        x = tl.where(mask, x, 2.0 * LOWEST)
        new = tl.maximum(top, tl.max(x, 1))
        rescale = tl.exp2(top - new)
        p = tl.exp2(x - new[:, None])
        norm = norm * rescale + tl.sum(p, 1)
        if HAS_V:
            value_at = v_at + cols[:, None].to(tl.int64) * v_n
            v_tile = tl.load(value_at, mask=(cols[:, None] < K) & (values[None, :] < E), other=0.0)
            weighted = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
            acc = acc * rescale[:, None] + weighted
        top = new
    if SINKS:
        sink = tl.load(sinks + h).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(top, sink)
        rescale = tl.exp2(top - new)
        norm, acc, top = norm * rescale + tl.exp2(sink - new), acc * rescale[:, None], new
    safe = tl.where(norm == 0.0, 1.0, norm)
    total = tl.where(norm == 0.0, 0.0, top + tl.log2(safe))
    at = bh.to(tl.int64) * M + rows
    tl.store(lse + at, total * 0.6931471805599453, mask=rows < M)
    if HAS_V:
        o_at = out + b.to(tl.int64) * o_b + h.to(tl.int64) * o_h
        o_at += rows[:, None].to(tl.int64) * o_m + values[None, :]
        value = (acc / safe[:, None]).to(out.dtype.element_ty)
        tl.store(o_at, value, mask=(rows[:, None] < M) & (values[None, :] < E))
