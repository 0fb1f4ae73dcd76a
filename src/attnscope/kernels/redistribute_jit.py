"""The move of `redistribute.py` in Triton: one reading and one writing of the activations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscope.kernels.redistribute import HALF, Bounds

BLOCK = 1024
COPIES = 16


def moved(a: Tensor, keys: Tensor, real: Tensor | None, found: Bounds) -> Tensor:
    """Activations [B, T, W] after the move; `amounts` are made on the way."""
    B, T, W = a.shape
    a = a.contiguous()
    out = torch.empty_like(a)
    quarter = triton.cdiv(W, 4)
    rank = None if real is None else torch.where(real, real.cumsum(1) - 1, -1).int()
    grid = B * T, triton.cdiv(quarter, BLOCK)
    _move[grid](
        a, out, keys, rank, found.near, found.high, found.low, T, W, quarter,
        PADDED=real is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def often(a: Tensor, real: Tensor | None) -> Tensor:
    """int64 [B, 2 · HALF]: how often each number of 16 bits occurs, in order."""
    B, T, W = a.shape
    a = a.contiguous()
    copies = max(1, COPIES // B)  # so that few count in the same place at once
    counts = torch.zeros((copies, B, 2 * HALF), dtype=torch.int32, device=a.device)
    blocks = triton.cdiv(T * W, BLOCK)
    there = a if real is None else real.contiguous()
    _count[(blocks, B)](
        a.view(torch.int16), there, counts, T * W, W, B * 2 * HALF, copies,
        PADDED=real is not None, BLOCK=BLOCK, HALF=HALF,
    )  # fmt: skip
    return counts.sum(0)


@triton.jit
def _count(  # type: ignore[no-untyped-def]
    a, real, counts, n, W, plane, copies, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    block, b = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    base = b.to(tl.int64) * n
    if PADDED:
        there = there & (tl.load(real + b * (n // W) + at // W, mask=there, other=0) != 0)
    bits = tl.load(a + base + at, mask=there, other=0).to(tl.int32)
    place = tl.where(bits >= 0, HALF + bits, -1 - bits)
    to = counts + (block % copies) * plane + b * 2 * HALF
    tl.atomic_add(to + place, 1, mask=there, sem="relaxed")


@triton.jit
def _move(  # type: ignore[no-untyped-def]
    a, out, keys, rank, near, high, low, T, W, quarter, PADDED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A block of the first quarter of a token's activations, and those a quarter further on."""
    row = tl.program_id(0)
    b = row // T
    first = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(rank + row) if PADDED else row % T
    limit, up, down = tl.load(near + b), tl.load(high + b), tl.load(low + b)
    none = tl.zeros([BLOCK], tl.uint32)
    words = tl.philox(
        tl.load(keys + b), first.to(tl.uint32), none + place.to(tl.uint32), none, none
    )
    base = row.to(tl.int64) * W
    for n in tl.static_range(4):
        at = first + n * quarter
        there = (first < quarter) & (at < W)
        value = tl.load(a + base + at, mask=there, other=0.0)
        x = value.to(tl.float32)
        amount = (words[n] >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2**-24
        new = x + amount * tl.where(x >= 0, up, down)
        moves = (tl.abs(x) <= limit) & (place >= 0)
        tl.store(out + base + at, tl.where(moves, new, x).to(value.dtype), mask=there)
