"""Finished reports are kept, and only those that this program made."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from attnscope.errors import InputError
from attnscope.report import report, write_report
from attnscope.run.store import open_run
from made_runs import made_run, write_run

cache = import_module("attnscope.report.cache")


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def build(
        run: Any, *, verdict_cache: Any, drawn: Any, theme: str = "published", **options: Any
    ) -> str:
        calls.append(options if theme == "published" else {"theme": theme, **options})
        return f"report {len(calls)}"

    monkeypatch.setattr(cache, "build", build)
    monkeypatch.setenv("ATTNSCOPE_HOME", str(tmp_path / "home"))
    return calls


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(made_run(prompts=2, measures=("entropy",)), tmp_path / "run")


def test_a_report_is_built_once_and_again_for_other_options(
    folder: Path, built: list[dict[str, Any]]
) -> None:
    run = open_run(folder)
    assert report(run) == report(open_run(folder)) == "report 1"
    assert write_report(run, folder / "report.html").read_text() == "report 1"
    assert report(run, theme="published") == "report 1"  # the default
    assert report(run, theme="safe") == "report 2"
    assert report(run, cluster="level") == "report 3"
    assert built == [{}, {"theme": "safe"}, {"cluster": "level"}]


def test_a_report_in_the_run_directory_is_not_used(
    folder: Path, built: list[dict[str, Any]]
) -> None:
    (folder / "report.html").write_text("from other people")
    assert report(open_run(folder)) == "report 1"


def test_a_damaged_run_has_no_report_even_if_one_is_kept(
    folder: Path, built: list[dict[str, Any]]
) -> None:
    assert report(open_run(folder)) == "report 1"
    file = next((folder / "cells").glob("*.values.parquet"))
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError) as error:
        report(open_run(folder))
    assert error.value.code == "damaged-file"


def test_only_the_newest_reports_are_kept(
    folder: Path, built: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "KEPT", 2)
    run = open_run(folder)
    for n, theme in enumerate(("a", "b", "c")):
        report(run, theme=theme)
        for file in (tmp_path / "home" / "reports").glob("*.html"):
            if file.read_text() == f"report {n + 1}":
                os.utime(file, (n, n))
    assert report(run, theme="c") == "report 3"
    assert report(run, theme="a") == "report 4"


def test_without_a_cache_folder_the_report_is_built(
    folder: Path, built: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTNSCOPE_HOME", str(tmp_path / "file"))
    assert report(open_run(folder)) == "report 1"
    assert report(open_run(folder)) == "report 2"
