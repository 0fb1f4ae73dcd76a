"""The commands of the command line: exit codes, output and errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnscope.cli import app, main
from attnscope.cli.progress import _Speed
from attnscope.errors import AttnscopeError
from attnscope.run.store import open_run
from attnscope.spec.experiment import make_experiment
from attnscope.spec.experiment_yaml import experiment_to_yaml
from made_models import save_model
from made_runs import made_run, write_run
from support_errors import raises


@pytest.fixture
def attnscope(capsys, monkeypatch):
    """Run a command; returns its exit code, its output and its standard error."""

    def run_command(*words, cwd=None):
        if cwd is not None:
            monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["attnscope", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run_command


@pytest.fixture
def refused(monkeypatch):
    """Run a command and expect an error with this code and these values."""

    def run_command(code, *words, **values):
        monkeypatch.setattr(sys, "argv", ["attnscope", *map(str, words)])
        with raises(AttnscopeError, code, **values):
            app()

    return run_command


@pytest.fixture(scope="module")
def file(tmp_path_factory, folder):
    experiment = make_experiment(
        name="small",
        models={"tiny": folder},
        prompts={"source": "math", "count": 4, "level": 1},
        measures=["mass"],
    )
    path = tmp_path_factory.mktemp("files") / "small.yaml"
    path.write_text(experiment_to_yaml(experiment))
    return path


def test_run_without_an_experiment_says_what_is_missing(attnscope):
    code, _, err = attnscope("run")
    assert code == 2
    assert "EXPERIMENT.yaml" in err


def test_device_and_type_of_the_command_replace_those_of_the_file(attnscope, file, tmp_path):
    how = ("--device", "cpu", "--dtype", "bfloat16", "--json")
    assert attnscope("run", file, *how, cwd=tmp_path)[0] == 0
    run = open_run(tmp_path / "runs" / "small")
    assert (run.experiment.device, run.experiment.dtype) == ("cpu", "bfloat16")
    code, _, err = attnscope("run", file, "--dtype", "float8", "--out", "other", cwd=tmp_path)
    assert code == 2
    assert "float8" in err
    assert "Traceback" not in err


def test_check_run_query(attnscope, file, folder, tmp_path):
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
    assert len(json.loads(out)["decides"]) == 1  # four prompts, no claims
    (tmp_path / "mine.yaml").write_text("claims: {all: mass > 0.9, sinks: mass < 1 in most heads}")
    how = ("--check", "--claims", "mine.yaml")
    code, out, err = attnscope("run", file, *how, "--json", cwd=tmp_path)
    _, mean, heads = json.loads(out)["decides"]
    assert (mean["claim"], mean["model"], mean["least"]) == ("all", "tiny", 6)
    code, out, err = attnscope("run", file, *how, cwd=tmp_path)
    assert {mean["text"], heads["text"]} <= set(out.splitlines())
    two = file.with_name("two.yaml")
    two.write_text(file.read_text().replace("models:\n", f"models:\n  second: {folder}\n", 1))
    (tmp_path / "mine.yaml").write_text(
        "claims: {each: mass > 0.1, pair: 'mass[model=b] > mass[model=a]', no: entropy > 1}"
    )
    out = attnscope("run", two, *how, "--json", cwd=tmp_path)[1]
    judged = [(one["claim"], one["model"]) for one in json.loads(out)["decides"][1:]]
    expected = [("each", "second"), ("each", "tiny"), ("pair", "tiny and second"), ("no", None)]
    assert judged == expected
    (tmp_path / "mine.yaml").unlink()

    code, out, err = attnscope("run", file, cwd=tmp_path)
    assert code == 0
    assert out == "small: 4 cells in runs/small\n"
    assert "small: 4/4 cells" in err
    assert "\r" not in err  # no terminal, no bar

    code, out, err = attnscope("run", file, "--json", cwd=tmp_path)
    assert (code, err) == (0, "")
    expected = [{"name": "small", "out": "runs/small", "cells": 4, "measured": 0}]
    assert json.loads(out) == expected

    sql = "SELECT prompt, sum(value) AS mass FROM values GROUP BY prompt ORDER BY prompt"
    code, out, err = attnscope("query", "runs/small", sql, "--json", cwd=tmp_path)
    assert code == 0
    rows = json.loads(out)
    assert [row["prompt"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["mass"] == pytest.approx(8)  # heads × layers
    code, out, err = attnscope("query", "runs/small", sql, "--csv", cwd=tmp_path)
    assert (code, err) == (0, "")
    header, *lines = out.splitlines()
    assert header == "prompt,mass"
    assert [line.split(",")[0] for line in lines] == ["0", "1", "2", "3"]
    code, out, err = attnscope("query", "runs/small", sql, cwd=tmp_path)
    assert "mass" in out
    assert "," not in out.splitlines()[1]


def test_query_prints_no_control_characters(attnscope, file, tmp_path):
    attnscope("run", file, cwd=tmp_path)
    sql = "SELECT chr(27) || '[31m' || text AS \"a\x1b[2J\" FROM tokens LIMIT 1"
    code, out, _ = attnscope("query", "runs/small", sql.replace("chr(27)", "'\x1b'"), cwd=tmp_path)
    assert code == 0
    assert "\x1b" not in out
    assert "\\x1b[31m" in out


def test_merge_joins_parts_and_fails_if_some_are_missing(attnscope, refused, file, tmp_path):
    text = file.read_text().replace("batch_tokens: auto", "batch_tokens: 64")
    (tmp_path / "small.yaml").write_text(text)
    for n in (1, 2):
        code, out, _ = attnscope(
            "run", "small.yaml", "--shard", f"{n}/2", "--out", f"part{n}", cwd=tmp_path
        )
        assert code == 0
        assert not (tmp_path / f"part{n}" / "manifest.json").exists()
    code, out, err = attnscope("merge", "part1", "--out", "whole", cwd=tmp_path)
    assert code == 1
    assert "attnscope run whole/experiment.yaml --out whole" in err
    code, out, err = attnscope("merge", "part1", "part2", "--out", "whole", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert out == "4 of 4 batches in whole\n"
    assert attnscope("run", "small.yaml", "--shard", "5/4", cwd=tmp_path)[0] == 2


@pytest.mark.wording
def test_an_error_is_one_message_without_a_traceback(attnscope, file, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(file.read_text().replace("layers:", "layrs:"))
    code, out, err = attnscope("run", wrong)
    assert (code, out) == (2, "")
    assert "unknown key 'layrs'; did you mean 'layers'?" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["reproduce", "token-type"], "unknown-recipe"),
        (["reproduce", "--heads", "3"], "missing-recipe"),
        (["reproduce", "token-types", "--real", "--models", "m"], "conflicting-options"),
        (["reproduce", "token-types", "--models", "=m"], "bad-option"),
        (["evaluate", "m", "--effect", "hash"], "missing-option"),
        (["figure", "RUN", "--heads", "A="], "bad-option"),
        (["figure", "RUN", "--layers", "a"], "bad-option"),
        (["figure", "RUN", "--set", "a"], "bad-option"),
        (["figure", "RUN", "--set", "run=1"], "unknown-option"),
        (["serve", "--no-open", "--model", "=m"], "bad-option"),
        (["serve", "--no-open", "missing"], "no-folder"),
    ],
)
def test_wrong_options(refused, tmp_path, words, code):
    if "RUN" in words:
        words = [str(write_run(made_run(), tmp_path / "run")) if w == "RUN" else w for w in words]
    refused(code, *words)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("look", ["--color", "--colour"]),
        ("reproduce", ["--normalize", "--normalise"]),
        ("compare", ["--normalize", "--normalise"]),
    ],
)
def test_both_spellings_are_accepted(attnscope, command, options):
    for option in options:
        code, out, _ = attnscope(command, option, "class", "--help")
        assert code == 0
        assert option in out


@pytest.mark.slow
def test_reproduce(attnscope, tmp_path):
    name = save_model(tmp_path / "some-model", layers=3, heads=8)
    words = ["reproduce", "filler-profile", "--models", f"mine={name}", "--prompts", "1"]
    code, out, err = attnscope(*words, "--queries", "all,last", "--heads", "2", cwd=tmp_path)
    assert code == 0, err
    assert "queries     all, last" in out
    assert "filler-profile: 2 cells in runs/filler-profile\n" in out
    folder = tmp_path / "runs" / "filler-profile"
    assert (folder / "manifest.json").is_file()
    assert (folder / "report.html").is_file()
    drawn = {path.suffix for path in (folder / "figures").glob("filler-profile.*")}
    assert drawn == {".png", ".svg", ".pdf", ".html", ".csv", ".md"}


def test_an_interrupted_run_can_be_continued(attnscope, file, tmp_path, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("attnscope.experiment.local.measure_batch", stop)
        code, out, err = attnscope("run", file, "--out", tmp_path / "run")
    assert (code, out) == (130, "")
    assert str(tmp_path / "run") in err
    assert attnscope("run", file, "--out", tmp_path / "run")[0] == 0


def test_a_slow_rate_is_per_minute(monkeypatch):
    now = iter([0.0, 40.0, 41.0])
    monkeypatch.setattr("attnscope.cli.progress.time.monotonic", lambda: next(now))
    speed = _Speed()
    assert [speed.rate(done) for done in (4, 6, 127)] == ["", ", 3 per minute", ", 3.0 per second"]


@pytest.mark.parametrize("command", ["run", "reproduce", "query"])
def test_help(attnscope, command):
    code, out, _ = attnscope(command, "--help")
    assert code == 0
    assert "--json" in out


def test_every_command_notes_an_unfinished_run(attnscope, tmp_path):
    folder = write_run(made_run(prompts=8), tmp_path / "run")
    (folder / "manifest.json").unlink()
    commands = {
        "query": [str(folder), "SELECT count(*) FROM cells"],
        "compare": [str(folder)],
        "figure": [str(folder), "classes", "--formats", "csv"],
        "describe": [str(folder), "classes"],
    }
    for command, arguments in commands.items():
        code, _, err = attnscope(command, *arguments)
        assert code == 0, err
        assert "16 cells" in err, command
        assert f"attnscope run {folder}/experiment.yaml --out {folder}" in err


def test_a_full_disk_is_an_error_without_a_traceback():
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
