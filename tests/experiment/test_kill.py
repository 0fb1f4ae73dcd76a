"""Killed at twenty moments and started again: the same bytes as a run left alone."""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attnscope.experiment.execute import run
from attnscope.question.yaml import written
from run_bytes import bytes_of

# A process that runs experiments and is killed costs seconds of imports each time. So a server
# imports everything once and forks: every child is a process of its own, killed with SIGKILL.
SERVER = """
import os, sys
import torch
torch.set_num_threads(1)
from transformers.utils import logging
logging.disable_progress_bar()
from attnscope.question.yaml import read_experiment
from attnscope.experiment.execute import run
import attnscope.experiment.batch, attnscope.loading
import transformers.models.qwen2.modeling_qwen2
experiment = read_experiment(sys.argv[1])
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(experiment, line.strip())
        os._exit(0)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def files_in(folder: Path) -> int:
    """How many files there are, half-written ones among them."""
    return sum(len(names) for _, _, names in os.walk(folder))


def is_over(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.mark.skipif(
    not hasattr(os, "fork") or not Path("/proc/self").exists(), reason="needs Linux"
)
def test_killed_at_twenty_moments(small, tmp_path):
    # A batch for each prompt: many files, so many different moments to be killed at.
    experiment = small(prompts={"source": "math", "count": 12, "level": 1}, batch_tokens=128)
    file = tmp_path / "experiment.yaml"
    file.write_text(written(experiment))
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def start(folder: Path) -> int:
        server.stdin.write(f"{folder}\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    def end() -> int:
        return int(server.stdout.readline())

    try:
        start(tmp_path / "whole")
        assert end() == 0
        whole = bytes_of(tmp_path / "whole")
        draw = random.Random(0)
        out = tmp_path / "run"
        killed = 0
        stopped_at = set()
        while killed < 20 or (len(stopped_at) < 8 and killed < 100):
            # A moment is a number of files to see before the signal; the directory starts again
            # from nothing whenever a run got through.
            before = files_in(out)
            moment = before + draw.randint(0, (len(whole) - before) // 3 + 1)
            child = start(out)
            while files_in(out) < moment and not is_over(child):
                pass
            if not is_over(child):
                os.kill(child, signal.SIGKILL)
            if end() == -signal.SIGKILL:
                killed += 1
                stopped_at.add(files_in(out))
                for name, content in bytes_of(out).items():
                    if not name.endswith(".part") and name != "environment.json":
                        assert content == whole[name]  # whatever has its name is whole
            else:
                assert bytes_of(out) == whole
                shutil.rmtree(out)
        start(out)
        assert end() == 0
        assert bytes_of(out) == whole
        assert len(stopped_at) >= 8  # moments all over the run, not one place again and again
    finally:
        server.stdin.close()
        server.stdout.close()
        server.wait()


def test_left_alone_in_this_process_the_bytes_are_the_same_too(small, tmp_path):
    run(small(), tmp_path / "one")
    run(small(), tmp_path / "two")
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
