"""Arguments that no program expects: an error in a line, never a traceback."""

import io
import sys

import pytest

from attnscope.cli import main

STRANGE = {
    "long": "x" * 1_000_000,
    "deep": "a/" * 5_000,
    "null": "a\0b",
    "half a character": "\ud800",
    "bytes of no text": "\udcff",
}
COMMANDS = ["compare", "describe", "figure", "merge", "query", "report", "run", "serve"]


def ended(monkeypatch, *words):
    """The exit code of a command whose output is not a file of the system."""
    monkeypatch.setattr(sys, "argv", ["attnscope", *words])
    with pytest.raises(SystemExit) as error:
        main()
    return error.value.code


@pytest.mark.parametrize("word", STRANGE)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_argument_ends_in_a_traceback(command, word, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    more = {"query": ["SELECT 1"], "merge": ["--out", "whole"]}
    assert ended(monkeypatch, command, STRANGE[word], *more.get(command, [])) not in (0, None)


@pytest.mark.parametrize("word", ["null", "half a character"])
def test_a_name_that_no_file_can_have(word, monkeypatch, capsys, tmp_path):
    assert ended(monkeypatch, "report", str(tmp_path), "--out", STRANGE[word]) == 2


def test_an_error_of_the_system_where_the_output_is_in_memory(monkeypatch):
    def fail():
        raise OSError(28, "no space left")

    monkeypatch.setattr("attnscope.cli.app", fail)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert ended(monkeypatch) == 2
