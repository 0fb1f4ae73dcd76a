"""`watch` on engines of vLLM, beside eager attention of transformers: only where vLLM is there."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

RUNS = Path(__file__).with_name("vllm_runs.py")
if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

CHECKS = [
    *(("llama", check) for check in ("batch", "as_before", "prefix_cache", "several", "stops")),
    *(("llama", check) for check in ("rows_and_flow", "errors")),
    ("small cache", "preemption"),
    ("windows and soft-cap", "batch"),
    ("windows and sinks", "batch"),
    ("ALiBi", "batch"),
    ("processes", "batch"),
    ("processes", "stop_strings"),
    ("processes", "page"),
    ("quantised cache", "quantised_cache"),
    ("speculative decoding", "speculation"),
    ("experiments", "experiments"),
]
"""Engines of `vllm_runs.py` with their checks."""

Find = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    """Runs the checks of an engine, once."""

    @cache
    def run(name: str) -> dict[str, str]:
        done = subprocess.run(
            [sys.executable, str(RUNS), name, str(tmp_path_factory.mktemp("model"))],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        assert lines, done.stderr[-4000:]
        found: dict[str, str] = json.loads(lines[-1].removeprefix("FOUND "))
        return found

    return run


@pytest.mark.vllm_engine
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("engine", "check"), CHECKS)
def test_engine(engine: str, check: str, find: Find) -> None:
    found = find(engine)[check]
    assert found == "right", found
