"""The tiles of the Triton programs: sizes, key extents and row ranges."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnscope.kernels.rows import KernelRows

FAR = 1 << 30
# From this many queries on, the descriptors of the tensor copy engine pay for themselves, and
# heads are better taken one after the other.
LONG = 16384
# Asking Triton's settings reads the environment each time.
INTERPRETED = bool(triton.knobs.runtime.interpret)


def contiguous_rows(tensor: Tensor) -> Tensor:
    """As it is if each row lies in one piece, which is how models hand them over."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def tma_view(tensor: Tensor, rows: int, queries: int) -> tuple[Any, int, int, int] | None:
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
    view = tensor.as_strided(shape, (across, 1))
    return (TensorDescriptor.from_tensor(view, [rows, D]), *where)


def pow2(size: int) -> int:
    """What a tile's side must be: a power of two, and enough for a tensor core."""
    return max(16, int(triton.next_power_of_2(size)))


def tile(D: int, q: Tensor, M: int) -> tuple[int, int, dict[str, int]]:
    """Queries and keys of a tile, and how to compile it: what measured fastest on an H200.

    Three programs of four warps share a multiprocessor, and take turns at the tensor cores and
    the exponential unit; the best explicit pipeline takes 0.87 of that (docs/benchmarks.md).
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


def row_tile(D: int, q: Tensor) -> tuple[int, int, dict[str, int]]:
    """The same where a program takes some rows and all the keys they see."""
    if INTERPRETED:
        return 32, 32, {"num_warps": 4, "num_stages": 1}
    if q.element_size() > 2:
        BM, BN = (64, 32) if D <= 128 else (32, 32)
        return BM, BN, {"num_warps": 4, "num_stages": 1}
    if D > 128:
        return 64, 32, {"num_warps": 4, "num_stages": 2}
    return 128, 64, {"num_warps": 8, "num_stages": 3}


def blocks(tensor: Tensor, size: int, fill: int) -> Tensor:
    """[B, M] as [B, blocks, size], the last block filled up."""
    B, M = tensor.shape
    short = triton.cdiv(M, size) * size - M
    return torch.nn.functional.pad(tensor, (0, short), value=fill).view(B, -1, size)


def _shared(rows: KernelRows, what: str, size: tuple[int, ...], make: Callable[[], Any]) -> Any:
    """What depends on the bounds and on whether there are holes, made once for all layers that
    share both. A layer with holes does not use what was made for one without."""
    key, bounds = (what, *size, rows.real is None), (rows.start, rows.stop, rows.self_key)
    cached = rows.cache.get(key)
    if cached is None or not all(a is b for a, b in zip(cached[0], bounds, strict=True)):
        cached = rows.cache[key] = bounds, make()
    return cached[1]


def key_extent(rows: KernelRows, BM: int) -> tuple[Tensor, Tensor]:
    """For each block of rows: first and one past last key that any of them sees, int32 [B, blocks].

    Layers under one mask share it.
    """

    def make() -> tuple[Tensor, Tensor]:
        start, stop = rows.start, rows.stop
        assert start is not None
        assert stop is not None
        sees = stop > start
        low = blocks(torch.where(sees, start, FAR), BM, FAR).amin(2)
        high = blocks(torch.where(sees, stop, 0), BM, 0).amax(2)
        return torch.minimum(low, high).int(), high.int()

    result: tuple[Tensor, Tensor] = _shared(rows, "extent", (BM,), make)
    return result


def row_ranges(rows: KernelRows, BM: int, BN: int) -> Tensor:
    """For each block of keys, int32 [B, blocks, 4]: the first block of rows that sees any of
    them, the run of those whose rows all see all of them from further on, and one past the last.
    """
    result: Tensor = _shared(rows, "ranges", (BM, BN), lambda: _row_ranges(rows, BM, BN))
    return result


def _row_ranges(rows: KernelRows, BM: int, BN: int) -> Tensor:
    B, K = rows.q.shape[0], rows.k.shape[2]
    if rows.q.shape[2] <= BM:
        # One block of rows: all key blocks use it with its bounds, which saves thirty launches.
        every = rows.k.new_zeros((B, triton.cdiv(K, BN), 4)).int()
        every[..., 3] = 1
        return every
    start, stop, self_key = rows.bounds()
    low, high = (bound[:, None] for bound in key_extent(rows, BM))
    left = torch.arange(0, K, BN, device=low.device)[:, None]
    right = left + BN
    meet = (low < right) & (high > left) & (high > low)
    order = torch.arange(meet.shape[2], device=low.device)
    first = torch.where(meet, order, meet.shape[2]).amin(2)
    last = torch.where(meet, order + 1, 0).amax(2)
    latest = blocks(start, BM, FAR).amax(2)[:, None]
    soonest = torch.minimum(blocks(stop, BM, 0).amin(2), blocks(self_key, BM, 0).amin(2))[:, None]
    fully_visible = (latest <= left) & (soonest >= right) & (rows.real is None)
    unmasked_start = torch.where(fully_visible, order, FAR).amin(2)
    unmasked_start = torch.minimum(torch.maximum(unmasked_start, first), last)
    broken = ~fully_visible & (order >= unmasked_start[..., None])
    unmasked_end = torch.where(broken, order, FAR).amin(2)
    unmasked_end = torch.maximum(torch.minimum(unmasked_end, last), unmasked_start)
    last = torch.maximum(last, first)
    return torch.stack([first, unmasked_start, unmasked_end, last], 2).int().contiguous()
