"""What the faults are tried on: small runs, and a server that starts many of them quickly.

Starting Python and importing torch takes seconds, so a server imports once and forks: every child
is a process of its own, with a command of the real command line, and can be killed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from attnscope.spec.experiment import Experiment, make_experiment
from attnscope.spec.experiment_yaml import experiment_to_yaml

__all__ = ["Server", "experiment", "prints", "write_experiment"]


def experiment(**keys: Any) -> Experiment:
    """A run of under a second, in a few batches."""
    asked: dict[str, Any] = {
        "name": "faults",
        "models": {"math": "zoo:math-qwen2"},
        "prompts": {"source": "math", "count": 24, "level": 1},
        "conditions": {"base": {}, "filler": {"insert": {"count": 9}}},
        "measures": ["mass", "lambda", "profile"],
        "profiles": {"layers": [0], "heads": [0]},
        "chat": False,
        "batch_tokens": 400,
    }
    return make_experiment(**{**asked, **keys})


def write_experiment(folder: Path, **keys: Any) -> Path:
    """The same, as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "experiment.yaml"
    file.write_text(experiment_to_yaml(experiment(**keys)), encoding="utf-8")
    return file


def prints(folder: Path) -> dict[str, str]:
    """A digest of every file of a run."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


_SERVER = """
import os, sys
import torch
torch.set_num_threads(1)
import attnscope.cli, attnscope.experiment.execute, attnscope.experiment.results, attnscope.loading
import attnscope.run.merge, attnscope.experiment.shard, attnscope.experiment.estimate
import transformers, transformers.models.qwen2.modeling_qwen2
from transformers.utils import logging
logging.disable_progress_bar()
for line in sys.stdin:
    log, *words = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.argv = ["attnscope", *words]
        code = 0
        try:
            attnscope.cli.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 99
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Server:
    """Starts commands, one after the other; several servers, several at once."""

    def __init__(self, folder: Path):
        self.log = folder / f"log-{id(self):x}.txt"
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )

    def start(self, *words: object) -> int:
        """A command of attnscope; its process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\t".join([str(self.log), *map(str, words)]) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> tuple[int, str]:
        """Its exit code (negative: the signal that ended it) and all that it printed."""
        assert self.process.stdout is not None
        code = int(self.process.stdout.readline())
        return code, self.log.read_text(encoding="utf-8", errors="replace")

    def run(self, *words: object) -> tuple[int, str]:
        """Start, and wait for the end."""
        self.start(*words)
        return self.end()

    def close(self) -> None:
        """No more commands."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
