"""Killed before each of its file operations and started again: the bytes of a run left alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attnscope.experiment.execute import run
from attnscope.spec.experiment_yaml import experiment_to_yaml
from run_bytes import bytes_of

# A process that runs an experiment costs seconds of imports. So a server imports everything once
# and forks: every child is a process of its own. Before its n-th operation on files of the run the
# child sends itself SIGKILL; with n = 0 it goes through, and the number of operations is its code.
SERVER = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from transformers.utils import logging
logging.disable_progress_bar()
from attnscope.spec.experiment_yaml import read_experiment
from attnscope.experiment.execute import run
import attnscope, attnscope.experiment.results, attnscope.run.schemas
experiment = read_experiment(sys.argv[1])
# Compiled loops are loaded once too. No table is made before a fork: its threads would be lost.
model, _ = attnscope.load(next(iter(experiment.models.values())))
with torch.no_grad(), attnscope.watch(model):
    model(torch.tensor([[5, 6, 7]]))
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link"}

def child(last, folder):
    done = 0

    def count(event, given):
        nonlocal done
        if event not in CHANGES or not isinstance(given[0], (str, bytes, os.PathLike)):
            return
        if not os.fsdecode(given[0]).startswith(folder):
            return
        if event == "open" and not given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        done += 1
        if done == last:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    run(experiment, folder)
    os._exit(done)

for line in sys.stdin:
    last, folder = line.rstrip().split(" ", 1)
    pid = os.fork()
    if pid == 0:
        try:
            child(int(last), folder)
        finally:
            os._exit(255)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture
def measure(small, tmp_path) -> Iterator[Callable[[int, Path], int]]:
    """Runs a small experiment of several batches, killed before an operation; gives the code."""
    experiment = small(
        prompts={"source": "math", "count": 2, "level": 1},
        conditions={"base": {}},
        measures=["mass"],
        batch_tokens=64,
    )
    file = tmp_path / "experiment.yaml"
    file.write_text(experiment_to_yaml(experiment))
    command = [sys.executable, "-c", SERVER, str(file)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def asked(last: int, folder: Path) -> int:
            server.stdin.write(f"{last} {folder}\n")
            server.stdin.flush()
            return int(server.stdout.readline())

        yield asked


@pytest.mark.timeout(1200)  # some fifty runs
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_before_every_operation(measure, tmp_path, step):
    operations = measure(0, tmp_path / "whole")
    assert 16 < operations < 255
    whole = bytes_of(tmp_path / "whole")
    for last in range(1, operations + 1, step):
        folder = tmp_path / str(last)
        assert measure(last, folder) == -signal.SIGKILL
        for name, content in bytes_of(folder).items():
            if not name.endswith(".part") and name != "environment.json":
                assert content == whole[name]  # a file with its name is whole
        assert 0 < measure(0, folder) < 255
        assert bytes_of(folder) == whole


def test_left_alone_in_this_process_the_bytes_are_the_same_too(small, tmp_path):
    run(small(), tmp_path / "one")
    run(small(), tmp_path / "two")
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
