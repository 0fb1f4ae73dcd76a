"""The commands, as somebody types them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnscope.cli import main
from attnscope.spec.experiment import made
from attnscope.spec.experiment_yaml import written
from made_models import save_model
from made_runs import made_run, write_run


@pytest.fixture
def attnscope(capsys, monkeypatch):
    """Type a command; its exit code, what it printed, and what it complained about."""

    def typed(*words, cwd=None):
        if cwd is not None:
            monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["attnscope", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return typed


@pytest.fixture(scope="module")
def file(tmp_path_factory, folder):
    experiment = made(
        name="small",
        models={"tiny": folder},
        prompts={"source": "math", "count": 4, "level": 1},
        measures=["mass"],
    )
    path = tmp_path_factory.mktemp("files") / "small.yaml"
    path.write_text(written(experiment))
    return path


def test_check_run_query(attnscope, file, tmp_path):
    code, out, err = attnscope("run", file, "--check", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "small: 4 cells, about" in out
    assert "MiB" in out
    assert "queries     all" in out
    assert [line for line in out.splitlines() if line.startswith("  digit: ")]
    assert not any(tmp_path.iterdir())
    code, out, err = attnscope("run", file, "--check", "--json", cwd=tmp_path)
    counts = {one["name"]: one for one in json.loads(out)["classes"]}
    assert counts["digit"]["tokens"] > 0
    assert counts["hash"]["without"] == [0, 1, 2, 3]

    code, out, err = attnscope("run", file, cwd=tmp_path)
    assert code == 0
    assert out == "small: 4 cells in runs/small\n"
    assert "small: 4/4 cells" in err
    assert "\r" not in err  # no terminal, no bar

    code, out, err = attnscope("run", file, "--json", cwd=tmp_path)
    assert (code, err) == (0, "")
    told = [{"name": "small", "out": "runs/small", "cells": 4, "measured": 0}]
    assert json.loads(out) == told

    sql = "SELECT prompt, sum(value) AS mass FROM values GROUP BY prompt ORDER BY prompt"
    code, out, err = attnscope("query", "runs/small", sql, "--json", cwd=tmp_path)
    assert code == 0
    rows = json.loads(out)
    assert [row["prompt"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["mass"] == pytest.approx(8)  # heads × layers
    code, out, err = attnscope("query", "runs/small", sql, cwd=tmp_path)
    assert "mass" in out


def test_query_prints_no_control_characters(attnscope, file, tmp_path):
    attnscope("run", file, cwd=tmp_path)
    sql = "SELECT chr(27) || '[31m' || text AS \"a\x1b[2J\" FROM tokens LIMIT 1"
    code, out, _ = attnscope("query", "runs/small", sql.replace("chr(27)", "'\x1b'"), cwd=tmp_path)
    assert code == 0
    assert "\x1b" not in out
    assert "\\x1b[31m" in out


def test_merge_joins_parts_or_says_what_is_missing(attnscope, file, tmp_path):
    text = file.read_text().replace("batch_tokens: auto", "batch_tokens: 64")
    (tmp_path / "small.yaml").write_text(text)
    for n in (1, 2):
        code, out, _ = attnscope(
            "run", "small.yaml", "--shard", f"{n}/2", "--out", f"part{n}", cwd=tmp_path
        )
        assert code == 0
        assert "other parts of the run are not there yet" in out
    code, out, err = attnscope("merge", "part1", "--out", "whole", cwd=tmp_path)
    assert code == 1
    assert "not whole yet" in err
    code, out, err = attnscope("merge", "part1", "part2", "--out", "whole", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert out == "4 of 4 batches in whole\n"
    code, _, err = attnscope("run", "small.yaml", "--shard", "5/4", cwd=tmp_path)
    assert code == 2
    assert "--shard '5/4' is no part of a run" in err


def test_errors_are_told_without_a_traceback(attnscope, file, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(file.read_text().replace("layers:", "layrs:"))
    code, out, err = attnscope("run", wrong)
    assert (code, out) == (2, "")
    assert "unknown key 'layrs'; did you mean 'layers'?" in err
    assert "Traceback" not in err
    code, _, err = attnscope("query", tmp_path, "SELECT 1")
    assert code == 2
    assert "not a run directory" in err
    code, _, err = attnscope("reproduce", "token-type")
    assert code == 2
    assert "token-types, filler-profile, filler-vs-sentence" in err
    code, _, err = attnscope("reproduce", "--heads", "3")
    assert code == 2
    assert "belong to one recipe" in err


def test_reproduce(attnscope, tmp_path):
    name = save_model(tmp_path / "some-model", layers=3, heads=8)
    words = ["reproduce", "filler-profile", "--models", f"mine={name}", "--prompts", "1"]
    code, out, err = attnscope(*words, "--queries", "all,last", "--heads", "2", cwd=tmp_path)
    assert code == 0, err
    assert "queries     all, last" in out
    assert "readers combine them by mean" in out
    assert "filler-profile: 2 cells in runs/filler-profile\n" in out
    folder = tmp_path / "runs" / "filler-profile"
    assert (folder / "manifest.json").is_file()
    assert (folder / "report.html").is_file()
    drawn = {path.suffix for path in (folder / "figures").glob("filler-profile.*")}
    assert drawn == {".png", ".svg", ".pdf", ".html", ".csv", ".md"}


def test_interrupt_says_how_to_go_on(attnscope, file, tmp_path, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("attnscope.experiment.local.measure_batch", stop)
        code, out, err = attnscope("run", file, "--out", tmp_path / "run")
    assert (code, out) == (130, "")
    assert "the same command continues there" in err
    assert attnscope("run", file, "--out", tmp_path / "run")[0] == 0


@pytest.mark.parametrize("command", ["run", "reproduce", "query"])
def test_help(attnscope, command):
    code, out, _ = attnscope(command, "--help")
    assert code == 0
    assert "--json" in out


def test_every_command_says_that_a_run_is_not_finished(attnscope, tmp_path):
    folder = write_run(made_run(prompts=8), tmp_path / "run")
    (folder / "manifest.json").unlink()
    asked = {
        "query": [str(folder), "SELECT count(*) FROM cells"],
        "compare": [str(folder)],
        "figure": [str(folder), "classes", "--formats", "csv"],
        "describe": [str(folder), "classes"],
    }
    for command, arguments in asked.items():
        code, _, said = attnscope(command, *arguments)
        assert code == 0, said
        assert "the run is not finished; this is about the 16 cells so far" in said, command
        assert f"attnscope run {folder}/experiment.yaml --out {folder}" in said


def test_output_that_nobody_has_room_for():
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from attnscope.cli import main; main()", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
