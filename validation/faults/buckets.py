"""Runs in a bucket of S3: the protocol itself, through s3fs, to a server of it on this machine.

    python validation/faults/buckets.py

The server is moto's (`pip install 'attnscope[faults]'`); Amazon's own was never asked.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from asked import Server, prints, write_experiment
from kills import kill_later
from results import keep

KEYS = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_REGION": "us-east-1"}
PARTS = 3


def there(store: Any, run: str) -> dict[str, str]:
    """A digest of every file of a run, read by a client that is not ours."""
    listed = store.list_objects_v2(Bucket="bucket", Prefix=f"{run}/").get("Contents", [])
    bodies = {
        one["Key"].removeprefix(f"{run}/"): store.get_object(Bucket="bucket", Key=one["Key"])
        for one in listed
    }
    return {
        name: hashlib.sha256(found["Body"].read()).hexdigest() for name, found in bodies.items()
    }


def killed_and_continued(
    server: Server, store: Any, file: Path, whole: dict[str, str], times: int
) -> tuple[int, int]:
    """How often a run was killed at random, and how often it did not end with the same bytes."""
    start, killed, bad, draw = time.monotonic(), 0, 0, random.Random(0)
    server.run("run", file, "--out", "s3://bucket/usual", "-q")
    usual = time.monotonic() - start
    for n in range(times):
        out = f"s3://bucket/killed-{n}"
        kill_later(server.start("run", file, "--out", out, "-q"), draw.uniform(0.3, 0.9) * usual)
        killed += server.end()[0] == -signal.SIGKILL
        code, output = server.run("run", file, "--out", out, "-q")
        if code != 0 or there(store, f"killed-{n}") != whole:
            bad += 1
            print(out, code, output[-500:])
    return killed, bad


def in_parts(server: Server, store: Any, file: Path, whole: dict[str, str]) -> bool:
    """Every part at its own address, and then joined."""
    out = "s3://bucket/joined"
    codes = [
        server.run("run", file, "--out", out, "--shard", f"{n}/{PARTS}", "-q")[0]
        for n in range(1, PARTS + 1)
    ]
    parts = [f"{out}-{n}-of-{PARTS}" for n in range(1, PARTS + 1)]
    code, output = server.run("merge", *parts, "--out", out)
    good = codes == [0] * PARTS and code == 0 and there(store, "joined") == whole
    if not good:
        print(codes, code, output[-500:])
    return good


def main() -> None:
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp())
    host = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    host.start()
    address = "http://{}:{}".format(*host.get_host_and_port())
    os.environ.update(KEYS, AWS_ENDPOINT_URL=address)
    store = boto3.client("s3")
    store.create_bucket(Bucket="bucket")
    file, server = write_experiment(folder), Server(folder)
    try:
        server.run("run", file, "--out", folder / "whole", "-q")
        whole = prints(folder / "whole")
        begun = time.monotonic()
        code, output = server.run("run", file, "--out", "s3://bucket/run", "-q")
        assert code == 0, output
        question = "SELECT item, avg(value) AS mean FROM values GROUP BY item ORDER BY item"
        places = (folder / "whole", "s3://bucket/run")
        answers = [server.run("query", at, question)[1] for at in places]
        same = there(store, "run") == whole and answers[0] == answers[1]
        outcome = "the same bytes as on a disk, and the same answer to a query"
        keep("a run in a bucket of S3 (moto's server, s3fs)", 1, outcome if same else "DIFFERENT",
             time.monotonic() - begun)  # fmt: skip
        begun = time.monotonic()
        killed, bad = killed_and_continued(server, store, file, whole, 8)
        keep("S3: killed (SIGKILL) at random", killed,
             f"{bad} WRONG" if bad else "continued to the same bytes",
             time.monotonic() - begun)  # fmt: skip
        begun = time.monotonic()
        good = in_parts(server, store, file, whole)
        keep("S3: parts at addresses of their own, merged", PARTS,
             "the same bytes" if good else "DIFFERENT", time.monotonic() - begun)  # fmt: skip
    finally:
        server.close()
        host.stop()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
