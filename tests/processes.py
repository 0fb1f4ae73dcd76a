"""Runs a function in several processes that share a gloo group; they meet at a file."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing import get_context


def in_processes(
    n: int, folder: Path, work: Callable[..., Any], *args: Any, limit: float = 300
) -> list[Any]:
    """What `work(rank, folder, *args)` returns in each of n processes, None if it was killed."""
    context = get_context("spawn")
    processes = [
        context.Process(target=_run, args=(rank, n, str(folder), work, args)) for rank in range(n)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(limit)
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not late, f"processes {late} did not end within {limit} s"
    results = []
    for rank in range(n):
        file = folder / f"result-{rank}"
        results.append(torch.load(file, weights_only=False) if file.exists() else None)
        file.unlink(missing_ok=True)
    failed = [each for each in results if isinstance(each, _Traceback)]
    assert not failed, failed[0]
    return results


class _Traceback(str):
    pass


def _run(rank: int, n: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=n)
    try:
        result = work(rank, Path(folder), *args)
    except BaseException:
        result = _Traceback(traceback.format_exc())
    torch.save(result, f"{folder}/result-{rank}")
    if not isinstance(result, _Traceback):
        distributed.barrier()
        distributed.destroy_process_group()
