"""Free memory: the same number for loading and measuring; the page cache counts as free."""

from pathlib import Path

import pytest
import torch

from attnscope import memory
from attnscope.scope import pending

GIB = 1 << 30
FREE = memory.free


@pytest.fixture(autouse=True)
def _real_memory(_fixed_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests use a fixed number."""
    monkeypatch.setattr(memory, "free", FREE)


def system(folder: Path, *, available: int, limit: str, used: int, cached: int) -> None:
    """The files of Linux for a machine and a container in it."""
    (folder / "meminfo").write_text(f"MemFree: 1 kB\nMemAvailable: {available // 1024} kB\n")
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")


@pytest.mark.parametrize(("limit", "expected"), [("max", 20 * GIB), (f"{8 * GIB}", 7 * GIB)])
def test_loading_and_measuring_agree(
    limit: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system(tmp_path, available=20 * GIB, limit=limit, used=3 * GIB, cached=2 * GIB)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.free() == expected
    assert pending.free_memory(torch.device("cpu")) == expected


def test_a_system_without_these_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "none")
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "none")
    assert memory.free() is None
    assert pending.free_memory(torch.device("cpu")) > 0
