"""Disks that are full or read-only, files that are cut or changed, two runners at once.

python validation/faults/disks.py
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from asked import Server, prints, write_experiment
from results import keep

COMMANDS = ("query", "figure", "compare", "report")


def clean(code: int, output: str) -> bool:
    """An error in words: no traceback, not killed."""
    return code in (1, 2) and "Traceback" not in output and "error: " in output


def full_disk(server: Server, folder: Path, file: Path, whole: dict[str, str]) -> None:
    """A file system of so many bytes that the run does not fit; then it is made larger."""
    place, sizes = folder / "small", (16, 48, 64, 96, 128, 160, 192, 256)
    place.mkdir()
    begun, good = time.monotonic(), 0
    for size in sizes:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            keep("a really full disk", 0, "skipped: only root may mount one", 0)
            return
        try:
            code, output = server.run("run", file, "--out", place / "run", "-q")
            refused = (
                clean(code, output) and "full" in output and "continues where it stopped" in output
            )
            subprocess.run(["mount", "-o", "remount,size=16m", str(place)], check=True)
            again, _ = server.run("run", file, "--out", place / "run", "-q")
            same = again == 0 and prints(place / "run") == whole
            good += (refused or code == 0) and same
            if not (refused or code == 0) or not same:
                print(f"{size}k: {code}, {output[-500:]}; again {again}")
        finally:
            subprocess.run(["umount", str(place)], check=True)
    outcome = "one line that names it; with more space the same command ends with the same bytes"
    keep("a really full disk (tmpfs of 16 to 256 KB)", len(sizes),
         outcome if good == len(sizes) else f"{len(sizes) - good} WRONG",
         time.monotonic() - begun)  # fmt: skip


def read_only(server: Server, folder: Path, file: Path, whole: dict[str, str]) -> None:
    place = folder / "read-only"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        keep("a read-only directory", 0, "skipped: only root may mount one", 0)
        return
    begun, good = time.monotonic(), 0
    try:
        server.run("run", file, "--out", place / "run", "-q")
        some = next((place / "run" / "cells").glob("*.values.parquet"))
        some.unlink()  # so that there is something to do
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        code, output = server.run("run", file, "--out", place / "run", "-q")
        good += clean(code, output) and "read-only" in output
        code, output = server.run("run", file, "--out", place / "new", "-q")
        good += clean(code, output) and "read-only" in output
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        code, output = server.run("run", file, "--out", place / "run", "-q")
        good += code == 0 and prints(place / "run") == whole
    finally:
        subprocess.run(["umount", str(place)], check=True)
    outcome = "one line that says so; writable again, mended to the same bytes"
    keep("a read-only directory", 2, outcome if good == 3 else f"{3 - good} WRONG",
         time.monotonic() - begun)  # fmt: skip


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def flipped(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def damaged(
    server: Server,
    folder: Path,
    file: Path,
    whole: dict[str, str],
    how: Callable[[bytes, random.Random], bytes],
    what: str,
    times: int,
) -> None:
    """Every reader refuses, and says which file; the same command measures it again."""
    begun, draw, bad = time.monotonic(), random.Random(what), 0
    for n in range(times):
        out = folder / f"{what}-{n}"
        shutil.copytree(folder / "whole", out)
        victim = draw.choice([path for path in sorted(out.rglob("*")) if path.is_file()])
        victim.write_bytes(how(victim.read_bytes(), draw))
        command = draw.choice(COMMANDS)
        words = ["query", out, "SELECT * FROM values"] if command == "query" else [command, out]
        code, output = server.run(*words)
        read = prints(out).get(str(victim.relative_to(out))) == whole[str(victim.relative_to(out))]
        needed = victim.suffix != ".parquet" or "values" in victim.name
        noticed = clean(code, output) or read or (code == 0 and not needed)
        again, after = server.run("run", file, "--out", out, "-q")
        mended = again == 0 and all(prints(out).get(name) == one for name, one in whole.items())
        refused = clean(again, after) and victim.suffix in (".yaml", ".json")
        if not noticed or not (mended or refused):
            bad += 1
            print(victim.name, command, code, output[-300:], again, after[-300:])
        shutil.rmtree(out)
    outcome = "noticed when it is read; measured again, or refused with what to do"
    keep(what, times, outcome if not bad else f"{bad} WRONG", time.monotonic() - begun)


def two_runners(folder: Path, file: Path, whole: dict[str, str], rounds: int) -> None:
    """At once, in one directory: alone, one is refused; as shards, both work."""
    begun, servers, bad = time.monotonic(), [Server(folder), Server(folder)], 0
    for n in range(rounds):
        out = folder / f"two-{n}"
        shards = n % 2 == 1
        for number, server in enumerate(servers, 1):
            part = ["--shard", f"{number}/2"] if shards else []
            server.start("run", file, "--out", out, "-q", *part)
        ends = [server.end() for server in servers]
        good = [code == 0 or (clean(code, output) and "is writing to" in output)
                for code, output in ends]  # fmt: skip
        done = any(code == 0 for code, _ in ends) and prints(out) == whole
        if not all(good) or not done or (shards and any(code for code, _ in ends)):
            bad += 1
            print(shards, [(code, output[-300:]) for code, output in ends])
        shutil.rmtree(out)
    for server in servers:
        server.close()
    outcome = "one works and the other is refused, or both as shards: always the same bytes"
    keep("two runners at once", rounds, outcome if not bad else f"{bad} WRONG",
         time.monotonic() - begun)  # fmt: skip


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    file, server = write_experiment(folder), Server(folder)
    code, output = server.run("run", file, "--out", folder / "whole", "-q")
    assert code == 0, output
    whole = prints(folder / "whole")
    full_disk(server, folder, file, whole)
    read_only(server, folder, file, whole)
    damaged(server, folder, file, whole, cut, "a file cut short", 25)
    damaged(server, folder, file, whole, flipped, "a flipped bit", 25)
    two_runners(folder, file, whole, 16)
    server.close()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
