"""`--device` and `--dtype` reach the model of every command that loads one."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import attnscope
from attnscope.cli import app

WHERE = ["--device", "cpu", "--dtype", "bfloat16", "--quiet"]


def _invoke(*arguments: str) -> None:
    done = CliRunner().invoke(app, [*arguments, *WHERE], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def test_evaluate(tmp_path: Path) -> None:
    options = ["--problems", "1", "--conditions", "baseline", "--level", "1"]
    _invoke("evaluate", "zoo:math-qwen2", *options, "--out", str(tmp_path / "run"))
    experiment = attnscope.open_run(tmp_path / "run").experiment
    assert (experiment.device, experiment.dtype) == ("cpu", "bfloat16")


def test_heads(tmp_path: Path) -> None:
    _invoke("heads", "zoo:math-qwen2", "--prompts", "1", "--out", str(tmp_path))
    for recipe in ("sinks", "induction", "needle"):
        assert attnscope.open_run(tmp_path / recipe).experiment.dtype == "bfloat16"


def test_reproduce(tmp_path: Path) -> None:
    options = ["--models", "zoo:math-qwen2", "--prompts", "1", "--layers", "0"]
    _invoke("reproduce", "sinks", *options, "--out", str(tmp_path))
    run = attnscope.open_run(tmp_path / "sinks")
    assert (run.experiment.device, run.experiment.dtype) == ("cpu", "bfloat16")


def test_unknown_values_are_refused(tmp_path: Path) -> None:
    for option, value in (("--dtype", "int8"), ("--device", "gpu7")):
        with pytest.raises(attnscope.AttnscopeError):
            CliRunner().invoke(app, ["reproduce", "sinks", option, value], catch_exceptions=False)
