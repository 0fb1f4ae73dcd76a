"""The paged Triton kernel beside the unpaged one, on the same queries and keys.

    PYTHONPATH=src python benchmarks/gpu_paged.py

Needs a CUDA device, and no vLLM: the pages are made here. Both compute the log-sum-exp and the
column sums. They take turns; a time is the median of the turns, and a ratio is the median of the
ratios of neighbouring turns.
"""

import platform
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from attnscope.kernels import KernelRows, kernel, triton_paged
from attnscope.kernels.triton_paged import PagedRows

# name, requests, position of the first query, queries, heads, KV heads, size, keys of a page
SHAPES = [
    ("prefill of 2,048 tokens", 4, 0, 2048, 32, 8, 128, 16),
    ("prefill of 8,192 tokens", 1, 0, 8192, 32, 8, 128, 16),
    ("chunk of 2,048 tokens after 14,336", 1, 14336, 2048, 32, 8, 128, 16),
    ("16 steps of 64 requests of 2,048 tokens", 64, 2032, 16, 32, 8, 128, 16),
    ("16 steps of 64 requests, pages of 64", 64, 2032, 16, 32, 8, 128, 64),
    ("prefill of 4,096 tokens, size 64", 4, 0, 4096, 16, 4, 64, 16),
]
TURNS = 15


def measure(run: Callable[[], Any]) -> float:
    """Milliseconds of one run."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def inputs(
    R: int, position: int, M: int, H: int, G: int, D: int, N: int
) -> tuple[PagedRows, KernelRows]:
    """The same queries and keys, paged and unpaged."""
    torch.manual_seed(0)
    K = position + M
    q = torch.randn(R * M, H, D, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(R, K, G, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    pages = -(-K // N)
    table = torch.randperm(R * pages, device="cuda").view(R, pages).int()
    cache = torch.zeros(R * pages, G, N, 2 * D, device="cuda", dtype=torch.bfloat16)
    padded = torch.nn.functional.pad(k, (0, 0, 0, pages * N - K))
    padded = padded.unflatten(2, (pages, N)).transpose(1, 2).flatten(0, 1)
    cache[table.flatten().long(), ..., :D] = padded
    counts = torch.full((R,), M, dtype=torch.int32, device="cuda")
    paged = PagedRows(
        q=q,
        k=cache[..., :D],
        table=table,
        first_row=(torch.arange(R, device="cuda") * M).int(),
        rows=counts,
        position=torch.full_like(counts, position),
        most_rows=M,
        most_keys=K,
        scale=D**-0.5,
    )
    plain = KernelRows(
        q=q.view(R, M, H, D).transpose(1, 2),
        k=k,
        scale=D**-0.5,
        causal=True,
        diagonal_offset=position,
    )
    return paged, plain


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {platform.python_version()}")
    for name, *shape in SHAPES:
        paged, plain = inputs(*shape)
        runs = partial(triton_paged.reduce, paged), partial(kernel("triton"), plain)
        sums, other = runs[0]()[0], runs[1]()
        off = float((sums.received - other.received).abs().max() / paged.most_rows)
        times = [[measure(run) for run in runs] for _ in range(TURNS + 3)][3:]
        ratio = statistics.median(a / b for a, b in times)
        a, b = (statistics.median(column) for column in zip(*times, strict=True))
        print(
            f"{name}: paged {a:.3f} ms, unpaged {b:.3f} ms, ratio {ratio:.2f}, "
            f"largest difference of a mean weight {off:.1e}"
        )


if __name__ == "__main__":
    main()
