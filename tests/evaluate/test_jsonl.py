"""Files of an evaluation survive being cut off, and whatever a model says."""

import os
from pathlib import Path

import pytest

from attnscope.errors import InputError
from attnscope.evaluate.jsonl import read_lines, replace_whole, written_lines
from support_errors import raises

# All of these end a line for Python, and none of them for JSON.
SAID = [{"said": "one\u2028two\u2029three\x85four\x1cfive\nsix"}, {"said": "数 🙂"}]


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    assert read_lines(file) == []
    file.write_bytes(written_lines(SAID))
    assert read_lines(file) == SAID


def test_a_line_that_was_cut_off_is_taken_away(tmp_path: Path) -> None:
    file, whole = tmp_path / "answers.jsonl", written_lines(SAID)
    for cut in range(1, len(whole)):
        file.write_bytes(whole[:cut])
        there = whole[:cut].count(b"\n")
        assert read_lines(file) == SAID[:there]
        assert file.read_bytes() == written_lines(SAID[:there])


def test_a_damaged_line_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_bytes(b'{"said": 1}\n{"sa\n')
    with raises(InputError, "damaged-file", path=str(file)):
        read_lines(file)


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "samples.jsonl"
    replace_whole(file, b"old")

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dies)
        with pytest.raises(KeyboardInterrupt):
            replace_whole(file, b"new")
    assert file.read_bytes() == b"old"
    replace_whole(file, b"new")
    assert file.read_bytes() == b"new"
