"""The streaming kernel as machine code, on a CPU: scores are read once for all sums.

The memory traffic of torch's operators costs as much as the matrix product. Here numba compiles
the loops (`numba_jit.py`) on the user's machine. `supports` lists the calls it takes; torch takes
the others, and all calls where numba is not installed or does not work.

The work is split into pieces, whatever the number of threads. Each piece has its own sums, which
are added in order. So the result has the same bytes on any number of cores.
"""

import ctypes
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnscope.kernels.call import SINGLE
from attnscope.kernels.rows import AttentionSums, KernelRows

# Pieces that a sequence is cut into at least, if each has so many rows: work for many cores.
PIECES, PIECE_ROWS = 64, 512
# Multiplications that are worth a second thread, some tenths of a millisecond; and how many times
# a thread comes back for more.
WORTH, TURNS = 1 << 24, 8
# Keys come in multiples of so many.
STEP = 32


def supports(rows: KernelRows, large: list[list[bool]]) -> bool:
    """Whether these rows can be reduced here; `large` where products are made in float64."""
    return (
        rows.q.device.type == "cpu"
        and rows.q.shape[2] > SINGLE
        and rows.lse is not None
        and not rows.partial
        and torch.float64 not in (rows.q.dtype, rows.k.dtype)
        and rows.scale != 0
        and rows.softcap is None
        and rows.key_bias is None
        and rows.distance_bias is None
        and not rows.score_biases
        and rows.fpc is None
        and not (torch.is_grad_enabled() and (rows.q.requires_grad or rows.k.requires_grad))
        and all(available(wide) for wide in {wide for each in large for wide in each})
    )


def _jit() -> Any:
    return import_module("attnscope.kernels.numba_jit")


@cache
def compiled_function(wide: bool) -> Callable[..., None]:
    """The loops, with products in float64 or float32. The first time on a machine this takes some
    seconds; then they are read from disk, or made in each process where nothing can be kept."""
    try:
        compiled: Callable[..., None] = _jit().build(wide=wide, cache=True)
    except (OSError, RuntimeError):  # numba raises these if it can write to no folder
        compiled = _jit().build(wide=wide, cache=False)
    return compiled


@cache
def available(wide: bool) -> bool:
    """Whether numba is here and can make them."""
    try:
        compiled_function(wide)
    except Exception:  # it has many ways to fail, and torch does the same work
        return False
    return True


def reduce(rows: KernelRows, score_bound: Tensor, large: list[list[bool]]) -> AttentionSums:
    """All totals of these rows; `score_bound` [B, H]."""
    B, H, M, D = rows.q.shape
    K = rows.k.shape[2]
    pieces = 1 if rows.group is not None else max(1, min(PIECES // H, -(-M // PIECE_ROWS)))
    with_bounds = K + -K % STEP
    sums = torch.zeros(B, H, pieces, 2, with_bounds, dtype=torch.float64)
    scalars = sums.new_zeros(B, H, pieces, 4)
    scalars[..., 3] = -torch.inf
    lse = sums.new_empty(B, H, M)
    flow = sums.new_zeros(B, H, rows.groups if rows.group is not None else 0, with_bounds)
    arrays = (*_arrays(rows), *(each.numpy() for each in (sums, scalars, lse, flow)))
    threads = torch.get_num_threads() if B * H * M * K * D > WORTH else 1
    large_mask = np.array(large)
    for wide in (False, True):
        if (large_mask == wide).any():
            scale = np.float64(rows.scale) if wide else np.float32(rows.scale)
            workspace = partial(_jit().make_workspace, with_bounds, D, wide=wide)
            _run_pieces(
                compiled_function(wide),
                B * H * pieces,
                threads,
                scale,
                workspace,
                (wide, large_mask, *arrays),
            )
    later, others = (sums.sum(2) if pieces > 1 else sums[:, :, 0])[..., :K].unbind(2)
    received = later + others
    self_mass, entropy = scalars[..., :2].sum(2).float().unbind(-1)
    return AttentionSums(
        received=received.float(),
        received_later=later.float(),
        mass=received.sum(-1).float(),
        entropy=entropy,
        self_mass=self_mass,
        lse=lse,
        lse_error=scalars[..., 2].amax(2).float(),
        max_logit=scalars[..., 3].amax(2).float() if rows.max_logit else None,
        score_bound=score_bound,
        flow=None if rows.group is None else flow[..., :K].float(),
    )


def _arrays(rows: KernelRows) -> list[Any]:
    """What the loops are given, with arrays without elements for what is None."""
    B = len(rows.q)

    def of(value: Tensor | None, dtype: torch.dtype, *none: int) -> Any:
        array = torch.empty(none, dtype=dtype) if value is None else value.detach().to(dtype)
        return array.numpy()

    return [
        of(rows.q, torch.float32),
        of(rows.k, torch.float32),
        *(of(each, torch.int32) for each in rows.bounds()),
        of(rows.lse, torch.float32),
        of(rows.real, torch.bool, B, 0),
        of(rows.weight, torch.float32, B, 0),
        of(rows.sinks, torch.float32, 0),
        of(rows.group, torch.int64, B, 0),
        int(rows.max_logit),
    ]


def _run_pieces(
    reduce_rows: Callable[..., None],
    count: int,
    threads: int,
    scale: Any,
    make_workspace: Callable[[], Any],
    arrays: tuple[Any, ...],
) -> None:
    """Do `count` pieces of work on this thread and on others beside it."""
    step = -(-count // (1 if threads == 1 else threads * TURNS))
    # Later rows of a text see more: the longest pieces come first.
    todo = deque(reversed(range(0, count, step)))
    done: list[int] = []

    def work() -> None:
        workspace = make_workspace()
        with suppress(IndexError):  # nothing is left
            while True:
                first = todo.popleft()
                reduce_rows(first, min(first + step, count), scale, workspace, *arrays)
                done.append(first)

    turns = len(todo)
    if turns == 1:
        work()
        return
    _parallel_for(work, min(threads, turns))
    if len(done) != turns:
        raise RuntimeError(f"{turns - len(done)} of {turns} parts of a layer were not measured")


def _parallel_for(work: Callable[[], None], threads: int) -> None:
    """Do the same on so many threads, this one among them; raises what one of them raised."""
    failed: list[BaseException] = []

    def one(_: Any) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    parallel = _openmp()
    if parallel is not None:
        parallel(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(one), None, threads, 0)
    else:
        with ThreadPoolExecutor(threads - 1) as pool:
            others = [pool.submit(one, None) for _ in range(threads - 1)]
            one(None)
            wait(others)
    if failed:
        raise failed[0]


@cache
def _openmp() -> Callable[..., None] | None:
    """What starts the threads that torch itself computes with, where it can be had. They wait for
    work by spinning, and would take half of a core from any others."""
    try:
        parallel: Any = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    parallel.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    parallel.restype = None
    function: Callable[..., None] = parallel
    return function
