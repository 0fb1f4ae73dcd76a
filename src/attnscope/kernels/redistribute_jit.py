"""The move of `redistribute.py` in Triton: one reading and one writing of the activations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscope.kernels.redistribute import Bounds

BLOCK = 1024


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
