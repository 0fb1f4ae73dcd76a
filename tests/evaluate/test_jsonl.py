"""Files of an evaluation survive interruptions, and completions with any characters."""

import os
from pathlib import Path

import pytest

from attnscope.errors import InputError
from attnscope.evaluate.jsonl import read_lines, to_lines, write_atomically
from support_errors import raises

# All of these end a line for Python, and none of them for JSON.
ROWS = [{"completion": "one\u2028two\u2029three\x85four\x1cfive\nsix"}, {"completion": "数 🙂"}]


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "completions.jsonl"
    assert read_lines(file) == []
    file.write_bytes(to_lines(ROWS))
    assert read_lines(file) == ROWS


def test_an_incomplete_last_line_is_removed(tmp_path: Path) -> None:
    file, whole = tmp_path / "completions.jsonl", to_lines(ROWS)
    for cut in range(1, len(whole)):
        file.write_bytes(whole[:cut])
        there = whole[:cut].count(b"\n")
        assert read_lines(file) == ROWS[:there]
        assert file.read_bytes() == to_lines(ROWS[:there])


def test_a_damaged_line_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "completions.jsonl"
    file.write_bytes(b'{"completion": 1}\n{"sa\n')
    with raises(InputError, "damaged-file", path=str(file)):
        read_lines(file)


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "samples.jsonl"
    write_atomically(file, b"old")

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dies)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"
