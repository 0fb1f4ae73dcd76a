"""Runs a function in several processes that share a gloo group; they meet at a file."""

import io
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing import get_context


def in_processes(
    n: int, folder: Path, work: Callable[..., Any], *args: Any, limit: float = 240
) -> list[Any]:
    """What `work(rank, folder, *args)` returns in each of n processes, None if it was killed.

    Every process lives until all have returned or died.
    """
    context, processes, pipes = get_context("spawn"), [], []
    for rank in range(n):
        here, there = context.Pipe()
        process = context.Process(target=_run, args=(there, rank, n, folder, work, args))
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    try:
        results = [_result(rank, pipe, limit) for rank, pipe in enumerate(pipes)]
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            pipe.close()
            process.join(5)
            process.kill()
    return results


def _result(rank: int, pipe: Any, limit: float) -> Any:
    assert pipe.poll(limit), f"process {rank} did not return within {limit} s"
    try:
        result, error = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
    except EOFError:
        return None
    assert error is None, f"process {rank}: {error}"
    return result


def _run(
    pipe: Any, rank: int, n: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=n)
    result, error = None, None
    try:
        result = work(rank, folder, *args)
    except BaseException:
        error = traceback.format_exc()
    packed = io.BytesIO()
    torch.save((result, error), packed)
    pipe.send_bytes(packed.getvalue())
    with suppress(EOFError):
        pipe.recv_bytes()  # until the others have returned
    os._exit(0)  # groups whose processes died do not end
