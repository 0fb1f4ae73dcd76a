"""Column sums of attention whose keys lie in pages, in Triton: the block table is read on the GPU.

Serving engines keep keys in pages, and a block table lists the pages of each request. The programs
here take packed queries of many requests in one launch. Every request has contiguous queries, each
of which sees the keys up to its own token, at most `window` of them.

Dimensions: R requests · T queries of all requests · H query heads · G KV heads · P pages ·
N keys of a page · D size of a query or key.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscope.kernels.autocast import without_autocast
from attnscope.kernels.call import LOG2E
from attnscope.kernels.rows import AttentionSums
from attnscope.kernels.triton_jit import LOWEST, LSE_INF, MASKED, _scores, _thread_sum
from attnscope.kernels.triton_tiles import INTERPRETED, pow2, row_tile, tile

UNLIMITED = 1 << 30
"""The window of layers without a sliding window."""


@dataclass(slots=True, eq=False, kw_only=True)
class PagedRows:
    """Queries of some requests, with their keys in pages."""

    q: Tensor
    """[T, H, D], the last dimension contiguous"""
    k: Tensor
    """[P, G, N, D]: the keys of all pages, with any strides"""
    table: Tensor
    """int32 [R, pages]: the pages of each request"""
    first_row: Tensor
    """int32 [R]: its first row of `q`"""
    rows: Tensor
    """int32 [R]: its number of rows"""
    position: Tensor
    """int32 [R]: position of its first row among its keys"""
    most_rows: int
    """The largest number of rows of a request"""
    most_keys: int
    """The largest number of keys: position and rows added up"""
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    """[H]"""
    window: int | None = None


def supports(q: Tensor, k: Tensor | None) -> bool:
    """Whether these tensors can be reduced here: 16 bits, as in `triton.reduce`."""
    here = q.is_cuda or INTERPRETED
    return k is not None and here and (q.element_size() == 2 or INTERPRETED) and q.stride(2) == 1


@without_autocast
def reduce(rows: PagedRows) -> tuple[AttentionSums, Tensor]:
    """The sums of each request [R, H, …] over `most_keys` keys, and the log-sum-exp [H, T].

    Keys after the last token of a request have sums of 0.
    """
    (T, H, D), (_, G, N, _) = rows.q.shape, rows.k.shape
    R, K = len(rows.table), rows.most_keys
    lse = rows.q.new_zeros((H, T), dtype=torch.float32)
    window = rows.window or UNLIMITED
    common = (
        rows.table, rows.first_row, rows.rows, rows.position,
        rows.q.stride(0), rows.q.stride(1), *rows.k.stride(), rows.table.stride(0),
        H, H // G, T, D, window, rows.scale * LOG2E, (rows.softcap or 0.0) * LOG2E,
    )  # fmt: skip
    flags = rows.softcap is not None, rows.window is not None
    BM, BN, options = row_tile(pow2(D), rows.q)
    BM = min(BM, pow2(rows.most_rows))
    grid: tuple[int, ...] = (triton.cdiv(rows.most_rows, BM), R * H)
    _launch(
        paged_lse, grid, (rows.q, rows.k, rows.sinks, lse, *common, *flags),
        {"SINKS": rows.sinks is not None, "N": N, "BM": BM, "BN": BN, "BD": pow2(D), **options},
        lse,
    )  # fmt: skip
    BM, BN, options = tile(D, rows.q, 0)
    BM = min(BM, pow2(rows.most_rows))
    blocks = triton.cdiv(K, BN)
    out = lse.new_zeros((2, R, H, K))
    scalars = lse.new_zeros((blocks, R, H, 3))
    _launch(
        paged_columns, (R * H, blocks), (rows.q, rows.k, lse, out, scalars, *common, K, *flags),
        {"N": N, "BM": BM, "BN": BN, "BD": pow2(D), "EVEN_D": pow2(D) == D, **options},
        lse,
    )  # fmt: skip
    mass, entropy, self_mass = scalars.sum(0).unbind(-1)
    sums = AttentionSums(
        received=out[0],
        received_later=out[1],
        mass=mass,
        entropy=entropy,
        self_mass=self_mass,
    )
    return sums, lse


def _launch(
    program: Any, grid: tuple[int, ...], arguments: Any, options: dict[str, Any], on: Tensor
) -> None:
    with torch.cuda.device(on.get_device()):  # -1 for a CPU, in the interpreter
        program[grid](*arguments, **options)


@triton.jit
def _key_offsets(table, cols, K, k_p, k_n, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where keys of a request begin in the pages, from its row of the block table."""
    page = tl.load(table + cols // N, mask=cols < K, other=0)
    return page.to(tl.int64) * k_p + (cols % N) * k_n


@triton.jit
def paged_lse(  # type: ignore[no-untyped-def]
    q, k, sinks, lse, table, first_row, n_rows, position, q_t, q_h, k_p, k_g, k_n, k_d, t_r,
    H, R, T, D, window, scale, cap,
    SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr, N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of some rows of one request and head, by online softmax."""
    block, rh = tl.program_id(0), tl.program_id(1)
    r, h = rh // H, rh % H
    M, offset = tl.load(n_rows + r), tl.load(position + r)
    if block * BM < M:
        rows = block * BM + tl.arange(0, BM)
        row_index = tl.minimum(rows, M - 1)
        token = offset + row_index
        dims = tl.arange(0, BD)
        first = tl.load(first_row + r)
        q_at = q + (first + row_index)[:, None].to(tl.int64) * q_t + h * q_h + dims[None, :]
        queries = tl.load(q_at, mask=(dims < D)[None, :], other=0.0)
        k_at = k + (h // R).to(tl.int64) * k_g + dims[:, None] * k_d
        mine = table + r.to(tl.int64) * t_r
        high = offset + tl.minimum(block * BM + BM, M)
        low = 0
        if WINDOWED:
            low = tl.maximum(offset + block * BM - window + 1, 0)
        top = tl.full([BM], LOWEST, tl.float32)
        norm = tl.zeros([BM], tl.float32)
        for n in range(low // BN, tl.cdiv(high, BN)):
            cols = n * BN + tl.arange(0, BN)
            key_at = k_at + _key_offsets(mine, cols, high, k_p, k_n, N)[None, :]
            keys = tl.load(key_at, mask=(cols < high)[None, :] & (dims < D)[:, None], other=0.0)
            x = _scores(queries, keys, scale, cap, SOFTCAP)
            mask = cols[None, :] <= token[:, None]
            if WINDOWED:
                mask = mask & (cols[None, :] > token[:, None] - window)
            x = tl.where(mask, x, 2.0 * LOWEST)
            new = tl.maximum(top, tl.max(x, 1))
            norm = norm * tl.exp2(top - new) + tl.sum(tl.exp2(x - new[:, None]), 1)
            top = new
        if SINKS:
            sink = tl.load(sinks + h).to(tl.float32) * 1.4426950408889634
            new = tl.maximum(top, sink)
            norm = norm * tl.exp2(top - new) + tl.exp2(sink - new)
            top = new
        at = lse + h.to(tl.int64) * T + first + rows
        tl.store(at, (top + tl.log2(norm)) * 0.6931471805599453, mask=rows < M)


@triton.jit
def _log_weights(  # type: ignore[no-untyped-def]
    keys, q_at, q_t, lse_at, m, dims, M, D, scale, cap,
    SOFTCAP: tl.constexpr, EVEN_D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """log2 A of one tile, keys × queries, before the mask; rows past the end get weight 0."""
    rows = m * BM + tl.arange(0, BM)
    at = q_at + tl.minimum(rows, M - 1)[None, :].to(tl.int64) * q_t + dims[:, None]
    queries = tl.load(at) if EVEN_D else tl.load(at, mask=(dims < D)[:, None], other=0.0)
    x = _scores(keys, queries, scale, cap, SOFTCAP)
    lse_tile = tl.load(lse_at + rows, mask=rows < M, other=LSE_INF)
    return x - lse_tile[None, :] * 1.4426950408889634


@triton.jit
def paged_columns(  # type: ignore[no-untyped-def]
    q, k, lse, out, scalars, table, first_row, n_rows, position,
    q_t, q_h, k_p, k_g, k_n, k_d, t_r, H, R, T, D, window, scale, cap, most_keys,
    SOFTCAP: tl.constexpr, WINDOWED: tl.constexpr, N: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """Column sums of one block of keys of one request and head, over the queries that see it."""
    rh, block, requests_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    r, h = rh // H, rh % H
    M, offset, left = tl.load(n_rows + r), tl.load(position + r), block * BN
    K, right = offset + M, left + BN
    # Rows that see some of the keys, and the run of those that see all of them from further on.
    first, last = tl.maximum(left - offset, 0) // BM, tl.cdiv(M, BM)
    unmasked_start, unmasked_end = tl.cdiv(tl.maximum(right - offset, 0), BM), last
    if WINDOWED:
        last = tl.cdiv(tl.minimum(M, tl.maximum(right + window - 1 - offset, 0)), BM)
        unmasked_end = tl.maximum(left + window - offset, 0) // BM
    unmasked_start = tl.minimum(unmasked_start, last)
    unmasked_end = tl.maximum(tl.minimum(unmasked_end, last), unmasked_start)
    if (left < K) & (first < last):
        cols, dims = left + tl.arange(0, BN), tl.arange(0, BD)
        mine = table + r.to(tl.int64) * t_r
        k_at = k + _key_offsets(mine, cols, K, k_p, k_n, N)[:, None]
        k_at += (h // R).to(tl.int64) * k_g + dims[None, :] * k_d
        keys = tl.load(k_at, mask=(cols < K)[:, None] & (dims < D)[None, :], other=0.0)
        begin = tl.load(first_row + r).to(tl.int64)
        q_at, lse_at = q + begin * q_t + h * q_h, lse + h.to(tl.int64) * T + begin
        total, entropy = tl.zeros([BN, 8], tl.float32), tl.zeros([BN, 8], tl.float32)
        on_self = tl.zeros([BN, 8], tl.float32)
        for t in range(first, last - (unmasked_end - unmasked_start)):
            m = tl.where(t < unmasked_start, t, t + unmasked_end - unmasked_start)
            rows = m * BM + tl.arange(0, BM)
            token = rows + offset
            x = _log_weights(
                keys, q_at, q_t, lse_at, m, dims, M, D, scale, cap, SOFTCAP, EVEN_D, BM
            )
            mask = (cols[:, None] <= token[None, :]) & (rows < M)[None, :]
            if WINDOWED:
                mask = mask & (cols[:, None] > token[None, :] - window)
            x = tl.where(mask, x, MASKED)
            p = tl.exp2(x)
            total += _thread_sum(p, BN, BM)
            entropy += _thread_sum(p * x, BN, BM)
            on_self += _thread_sum(tl.where(token[None, :] == cols[:, None], p, 0.0), BN, BM)
        self_sum = tl.sum(on_self, 1)
        for m in range(unmasked_start, unmasked_end):
            x = _log_weights(
                keys, q_at, q_t, lse_at, m, dims, M, D, scale, cap, SOFTCAP, EVEN_D, BM
            )
            p = tl.exp2(x)
            total += _thread_sum(p, BN, BM)
            entropy += _thread_sum(p * x, BN, BM)
        received = tl.sum(total, 1)
        at = out + rh.to(tl.int64) * most_keys + cols
        tl.store(at, received, mask=cols < K)
        plane = requests_heads.to(tl.int64) * most_keys
        tl.store(at + plane, tl.maximum(received - self_sum, 0.0), mask=cols < K)
        scalar = scalars + 3 * (block.to(tl.int64) * requests_heads + rh)
        tl.store(scalar, tl.sum(received))
        tl.store(scalar + 1, -0.6931471805599453 * tl.sum(entropy))
        tl.store(scalar + 2, tl.sum(self_sum))
