"""A real Ray cluster of two workers: the same bytes; a worker killed; the driver killed.

    python validation/faults/ray_cluster.py [same|far|worker|driver|speed]

Nothing here is simulated: processes are killed with SIGKILL. `speed` only where it is asked for: it
says something on two idle cores alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from asked import experiment, prints, write_experiment
from results import keep

LONG = {"prompts": {"source": "math", "count": 48, "level": 2}, "batch_tokens": 300}


def command(file: Path, out: Path | str, *options: str) -> list[str]:
    main = "from attnscope.cli import main; main()"
    return [sys.executable, "-c", main, "run", str(file), "--out", str(out), "-q", *options]


def start(file: Path, out: Path | str, *options: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(file, out, *options), env=env, stderr=subprocess.DEVNULL, start_new_session=True
    )


def whole(folder: Path) -> tuple[Path, dict[str, str]]:
    file = write_experiment(folder, **LONG)
    assert start(file, folder / "whole").wait() == 0
    return file, prints(folder / "whole")


def workers(driver: int) -> list[int]:
    """Processes that measure for a driver: below it, by what Ray calls them."""
    above, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                names[int(entry.name)] = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            above[int(entry.name)] = int(stat[1])

    def below(pid: int) -> bool:
        return pid == driver or (pid in above and below(above[pid]))

    # Ray calls a worker by its class or by the batch it has at hand, its own agents otherwise.
    ours = (b"ray::_Worker", b" cells, ")
    return [
        pid
        for pid, name in names.items()
        if name.startswith(b"ray::") and any(part in name for part in ours) and below(pid)
    ]


def cells(out: Path) -> int:
    return len(list((out / "cells").glob("*.json"))) if (out / "cells").is_dir() else 0


def wait_for(out: Path, number: int, process: subprocess.Popen[bytes]) -> None:
    while cells(out) < number and process.poll() is None:
        time.sleep(0.01)


def same(folder: Path) -> None:
    file, expected = whole(folder)
    begun = time.monotonic()
    assert start(file, folder / "run", "--ray", "--workers", "2").wait() == 0
    ok = prints(folder / "run") == expected
    took = time.monotonic() - begun
    keep("ray: two workers", 1, "the same bytes as in one process" if ok else "DIFFERENT", took)


def far(folder: Path) -> None:
    """To an address, through fsspec, as to an object store; this one can be looked into."""
    file, expected = whole(folder)
    begun = time.monotonic()
    assert start(file, f"file://{folder}/run", "--ray", "--workers", "2").wait() == 0
    ok = prints(folder / "run") == expected
    outcome = "the same bytes as in one process" if ok else "DIFFERENT"
    keep("ray: two workers that write to an address", 1, outcome, time.monotonic() - begun)


def worker(folder: Path) -> None:
    file, expected = whole(folder)
    begun, killed = time.monotonic(), 0
    process = start(file, folder / "run", "--ray", "--workers", "2")
    for moment in (3, 9):
        wait_for(folder / "run", moment, process)
        busy = workers(process.pid)
        if busy and process.poll() is None:
            os.kill(busy[0], signal.SIGKILL)
            killed += 1
    code = process.wait()
    ok = code == 0 and killed > 0 and prints(folder / "run") == expected
    outcome = "the run finished with the same bytes" if ok else f"exit code {code}, or DIFFERENT"
    keep("ray: worker killed (SIGKILL)", killed, outcome, time.monotonic() - begun)


def driver(folder: Path) -> None:
    file, expected = whole(folder)
    begun = time.monotonic()
    process = start(file, folder / "run", "--ray", "--workers", "2")
    wait_for(folder / "run", 4, process)
    started = workers(process.pid)
    os.killpg(process.pid, signal.SIGKILL)  # the driver, and the head that it started
    process.wait()
    there = cells(folder / "run")
    while any(Path(f"/proc/{pid}").exists() for pid in started):  # they end when they notice
        time.sleep(0.1)
    code = start(file, folder / "run", "--ray", "--workers", "2").wait()
    ok = code == 0 and prints(folder / "run") == expected
    outcome = f"stopped after {there} batches; continued to the same bytes" if ok else "DIFFERENT"
    keep("ray: driver and head killed (SIGKILL)", 1, outcome, time.monotonic() - begun)


def speed(folder: Path, prompts: int = 12_000) -> None:
    """Seconds from the first batch to the last, one worker and two, one thread each."""
    import torch

    torch.set_num_threads(1)
    from attnscope.experiment.execute import run
    from attnscope.experiment.ray import on_ray

    asked = experiment(
        prompts={"source": "math", "count": prompts, "level": 3},
        batch_tokens=2048,
        measures=["mass", "entropy"],
    )
    took = {}
    for number in (1, 2):
        out = folder / str(number)
        moments: list[tuple[float, int]] = []
        run(
            asked,
            out,
            executor=on_ray("local", out, workers=number),
            progress=lambda _, tokens, total, at=moments: at.append((time.monotonic(), tokens)),
        )
        measuring = [moment for moment in moments if moment[1] > 0]
        seconds = measuring[-1][0] - measuring[0][0]
        share = 1 - measuring[0][1] / measuring[-1][1]
        took[number] = seconds / share
        print(f"{number} workers: {took[number]:.1f} s, {len(measuring)} batches", flush=True)
    assert prints(folder / "1") == prints(folder / "2")
    keep(
        "ray: two workers over one, one thread each",
        1,
        f"{took[1]:.0f} s and {took[2]:.0f} s: {took[1] / took[2]:.2f} times as fast, same bytes",
        sum(took.values()),
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or ["same", "far", "worker", "driver"]:
        with tempfile.TemporaryDirectory() as place:
            parts = {"same": same, "far": far, "worker": worker, "driver": driver, "speed": speed}
            parts[name](Path(place))
