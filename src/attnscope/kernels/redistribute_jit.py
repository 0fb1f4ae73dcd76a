"""The move of `redistribute.py` in Triton: one reading and one writing of the activations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnscope.kernels.redistribute import HALF, Bounds

BLOCK = 1024
# Numbers of 16 bits are counted in memory, a place each, which is slow; those of the commonest
# stretches on the chip, which is fast but small: so many stretches of so many numbers.
COPIES = 16
COMMON, STRETCH = 8, 64
# What is looked through for them (blocks), what a program counts on the chip (tiles of so many
# numbers), and from how many numbers on it is worth the trouble.
SAMPLED_BLOCKS = 64
TILE, TILES = 8192, 8
MANY = 1 << 20


def apply_shift(a: Tensor, keys: Tensor, real: Tensor | None, histogram: Bounds) -> Tensor:
    """Activations [B, T, W] after the move; `amounts` are made on the way."""
    B, T, W = a.shape
    a = a.contiguous()
    out = torch.empty_like(a)
    quarter = triton.cdiv(W, 4)
    rank = None if real is None else torch.where(real, real.cumsum(1) - 1, -1).int()
    grid = B * T, triton.cdiv(quarter, BLOCK)
    _move[grid](
        a, out, keys, rank, histogram.near, histogram.high, histogram.low, T, W, quarter,
        PADDED=real is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def histogram16(a: Tensor, real: Tensor | None) -> Tensor:
    """int64 [B, 2 · HALF]: how often each number of 16 bits occurs, in order."""
    B, T, W = a.shape
    n = T * W
    bits = a.contiguous().view(torch.int16)
    mask = bits if real is None else real.contiguous()
    copies = max(1, COPIES // B)  # so that few count in the same place at once
    counts = torch.zeros((copies, B, 2 * HALF), dtype=torch.int32, device=a.device)
    options = {"PADDED": real is not None, "HALF": HALF}
    blocks = triton.cdiv(n, BLOCK)
    if n < MANY:
        _count[(blocks, B)](bits, mask, counts, n, W, B, copies, 1, BLOCK=BLOCK, **options)
        return counts.sum(0)
    # Any stretches give the same counts; the commonest of some blocks give them soonest. An odd
    # step, lest all blocks begin at the same activation.
    rough = torch.zeros((B, 2 * HALF), dtype=torch.int32, device=a.device)
    step = max(1, blocks // SAMPLED_BLOCKS - 1) | 1
    grid = min(SAMPLED_BLOCKS, blocks), B
    _count[grid](bits, mask, rough, n, W, B, 1, step, BLOCK=BLOCK, **options)
    common = rough.view(B, -1, STRETCH).sum(2).topk(COMMON).indices.int()
    _count_common[(triton.cdiv(n, TILE * TILES), B)](
        bits, mask, common, counts, n, W, B, copies,
        COMMON=COMMON, STRETCH=STRETCH, TILE=TILE, TILES=TILES, num_warps=8, **options,
    )  # fmt: skip
    return counts.sum(0)


@triton.jit
def _indices(  # type: ignore[no-untyped-def]
    bits, real, first, n, W, b, PADDED: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Where in order the numbers from `first` on are, and which of them are there."""
    further = tl.arange(0, SIZE)
    valid = further < n - first
    if PADDED:
        token = first // W + (first % W + further) // W
        valid = valid & (tl.load(real + b * (n // W) + token, mask=valid, other=0) != 0)
    number = tl.load(bits + b.to(tl.int64) * n + first + further, mask=valid, other=0)
    number = number.to(tl.int32)
    return tl.where(number >= 0, HALF + number, -1 - number), valid


@triton.jit
def _count(  # type: ignore[no-untyped-def]
    bits, real, counts, n, W, B, copies, step, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Every step-th block, in memory."""
    block, b = tl.program_id(0), tl.program_id(1)
    first = (block * step).to(tl.int64) * BLOCK
    index, valid = _indices(bits, real, first, n, W, b, PADDED, BLOCK, HALF)
    to = counts + ((block % copies) * B + b) * 2 * HALF
    tl.atomic_add(to + index, 1, mask=valid, sem="relaxed")


@triton.jit
def _count_common(  # type: ignore[no-untyped-def]
    bits, real, common, counts, n, W, B, copies, PADDED: tl.constexpr, HALF: tl.constexpr,
    COMMON: tl.constexpr, STRETCH: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Common stretches on the chip, what is left in memory."""
    program, b = tl.program_id(0), tl.program_id(1)
    to = counts + ((program % copies) * B + b) * 2 * HALF
    mine = common + b * COMMON
    histogram = tl.zeros([COMMON * STRETCH], tl.int32)
    for tile in range(TILES):
        first = (program.to(tl.int64) * TILES + tile) * TILE
        index, valid = _indices(bits, real, first, n, W, b, PADDED, TILE, HALF)
        stretch = index // STRETCH
        on_chip = tl.full([TILE], -1, tl.int32)
        for k in tl.static_range(COMMON):
            of = tl.load(mine + k)
            on_chip = tl.where(stretch == of, index + (k - of) * STRETCH, on_chip)
        common_ones = valid & (on_chip >= 0)
        histogram += tl.histogram(tl.maximum(on_chip, 0), COMMON * STRETCH, mask=common_ones)
        tl.atomic_add(to + index, 1, mask=valid & (on_chip < 0), sem="relaxed")
    each = tl.arange(0, COMMON * STRETCH)
    index = tl.load(mine + each // STRETCH) * STRETCH + each % STRETCH
    tl.atomic_add(to + index, histogram, mask=histogram > 0, sem="relaxed")


@triton.jit
def _move(  # type: ignore[no-untyped-def]
    a, out, keys, rank, near, high, low, T, W, quarter, PADDED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A block of the first quarter of a token's activations, and those a quarter further on."""
    row = tl.program_id(0)
    b = row // T
    first = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(rank + row) if PADDED else row % T
    limit, up, down = tl.load(near + b), tl.load(high + b), tl.load(low + b)
    none = tl.zeros([BLOCK], tl.uint32)
    words = tl.philox(
        tl.load(keys + b), first.to(tl.uint32), none + index.to(tl.uint32), none, none
    )
    base = row.to(tl.int64) * W
    for n in tl.static_range(4):
        at = first + n * quarter
        valid = (first < quarter) & (at < W)
        value = tl.load(a + base + at, mask=valid, other=0.0)
        x = value.to(tl.float32)
        amount = (words[n] >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2**-24
        new = x + amount * tl.where(x >= 0, up, down)
        moves = (tl.abs(x) <= limit) & (index >= 0)
        tl.store(out + base + at, tl.where(moves, new, x).to(value.dtype), mask=valid)
