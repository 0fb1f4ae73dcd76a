"""Files in a run directory that are none of ours: pipes, devices, links, endless files."""

import os
import shutil

import pytest

from attnscope.errors import InputError
from attnscope.experiment.execute import run
from attnscope.run.store import open_run
from attnscope.spec.experiment import make_experiment

SPECIAL = {
    "pipe": lambda path: os.mkfifo(path),
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to(path.parent.parent / "elsewhere"),
    "folder": lambda path: path.mkdir(),
}


@pytest.fixture(scope="module")
def experiment(folder):
    source = {"source": "math", "count": 2, "level": 1}
    return make_experiment(name="small", models={"tiny": folder}, prompts=source, measures=["mass"])


@pytest.fixture(scope="module")
def done(tmp_path_factory, experiment):
    out = tmp_path_factory.mktemp("runs") / "run"
    run(experiment, out)
    return out


def read_all(path):
    opened = open_run(path)
    opened.verify()
    return opened.sql("SELECT * FROM prompts")


@pytest.mark.parametrize("what", SPECIAL)
@pytest.mark.parametrize(
    "name", ["environment.json", "metadata.jsonl", "cells/*.json", "cells/*.values.parquet"]
)
def test_a_special_file_is_neither_waited_for_nor_read(done, experiment, tmp_path, name, what):
    copy = tmp_path / "run"
    shutil.copytree(done, copy)
    path = next(copy.glob(name))
    for place in (tmp_path, copy):
        shutil.copy(path, place / "elsewhere")
    (copy / "elsewhere").unlink()
    path.unlink()
    SPECIAL[what](path)
    with pytest.raises(InputError):
        read_all(copy)
    if what == "folder":
        return
    if name == "environment.json":
        with pytest.raises(InputError):
            run(experiment, copy)
    else:
        run(experiment, copy)
        assert path.is_file()
        assert not path.is_symlink()
        assert path.read_bytes() == (done / path.relative_to(copy)).read_bytes()


def test_an_experiment_that_is_a_link_is_not_read(done, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(done, copy)
    shutil.move(copy / "experiment.yaml", tmp_path / "elsewhere.yaml")
    (copy / "experiment.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    with pytest.raises(InputError):
        open_run(copy)


def test_a_json_file_that_is_too_large_is_damage(done, monkeypatch):
    monkeypatch.setattr("attnscope.run.layout.LARGEST", 10)
    with pytest.raises(InputError):
        open_run(done)
