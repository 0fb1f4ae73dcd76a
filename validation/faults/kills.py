"""SIGKILL at random moments, over many short runs: what is there afterwards is whole, and the same
command ends with the bytes of a run that was left alone. Some rounds have several shards.

    python validation/faults/kills.py [200]
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import attnscope
from asked import Server, prints, write_experiment
from attnscope.errors import InputError
from results import keep


def wrong(out: Path, whole: dict[str, str]) -> list[str]:
    """Files that have their names and not their bytes; only the environment grows."""
    return [
        name
        for name, digest in (prints(out) if out.is_dir() else {}).items()
        if not name.endswith(".part") and name != "environment.json" and whole.get(name) != digest
    ]


def readable(out: Path) -> bool:
    """What a killed run left can be read, or is nothing yet."""
    try:
        attnscope.open_run(out).values.collect()
    except InputError as error:
        return error.code in ("not-a-run", "folder-missing")
    return True


def kill_later(pid: int, seconds: float, begun: Path | None = None) -> None:
    """Kill after so many seconds, or so many after something was there."""
    while begun is not None and not begun.exists() and Path(f"/proc/{pid}").exists():
        time.sleep(0.002)
    time.sleep(seconds)
    if Path(f"/proc/{pid}").exists():
        os.kill(pid, signal.SIGKILL)


def main(number: int) -> None:
    folder = Path(tempfile.mkdtemp())
    file, out = write_experiment(folder, batch_tokens=200), folder / "run"
    server = Server(folder)
    begun = time.monotonic()
    server.run("run", file, "--out", folder / "warm", "-q")
    start = time.monotonic()
    server.start("run", file, "--out", folder / "whole", "-q")
    while not (folder / "whole" / "cells").exists():
        time.sleep(0.002)
    first = time.monotonic()
    code, output = server.end()
    assert code == 0, output
    usual, writing = time.monotonic() - start, time.monotonic() - first
    whole = prints(folder / "whole")
    draw = random.Random(os.getpid())
    killed = rounds = bad = 0
    stages: set[int] = set()
    while killed < number:
        options = ["--shard", f"{draw.randint(1, 3)}/3"] if draw.random() < 0.3 else []
        pid = server.start("run", file, "--out", out, "-q", *options)
        if draw.random() < 0.5 and not (out / "cells").exists():  # half while files are written
            kill_later(pid, draw.random() * writing, out / "cells")
        else:
            kill_later(pid, draw.random() * usual)
        code, output = server.end()
        if code == -signal.SIGKILL:
            killed += 1
            stages.add(len(list(out.rglob("*"))))
        elif code != 0:
            bad += 1
            print("exit code", code, output)
        if found := wrong(out, whole):
            bad += 1
            print("wrong bytes", found)
        if not readable(out):
            bad += 1
            print("cannot be read")
        if (out / "manifest.json").is_file() or draw.random() < 0.2:
            code, output = server.run("run", file, "--out", out, "-q")
            same = code == 0 and prints(out) == whole
            bad += not same
            rounds += 1
            shutil.rmtree(out)
    server.close()
    shutil.rmtree(folder)
    outcome = f"{rounds} runs resumed from {len(stages)} stages, every one with the same bytes"
    outcome = outcome if not bad else f"{bad} WRONG"
    keep("`run`, and shards of it, killed (SIGKILL) at random", killed, outcome,
         time.monotonic() - begun)  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
