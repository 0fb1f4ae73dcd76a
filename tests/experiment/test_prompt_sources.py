"""Prompts in the experiment itself, and those of a hub: measured like those of a file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import attnscope
from attnscope.errors import InputError
from attnscope.experiment.execute import run
from attnscope.experiment.plan import make_plan
from attnscope.spec.experiment_yaml import read_experiment
from run_bytes import bytes_of
from support_errors import raises

RECORDS = [
    {"text": "Tom has no apples.", "word": "no", "order": 1},
    {"text": "Ann has two red apples.", "word": "two", "order": 2},
    {"text": "He sold all of them.", "word": "all", "order": 1},
]
LAYOUT: dict[str, Any] = {"template": "{text}", "mark": {"chosen": "word"}}


@pytest.fixture
def write(folder: str, tmp_path: Path) -> Any:
    """Writes an experiment with these prompts, and returns its file."""

    def make(prompts: Any, name: str = "asked") -> Path:
        keys = {"name": name, "models": {"tiny": folder}, "prompts": prompts, "chat": False}
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(keys | {"keys": ["all", "chosen"]}))
        return file

    return make


def jsonl(folder: Path, records: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "train.jsonl").write_text("".join(lines))


def test_every_source_gives_the_same_cells(write: Any, tmp_path: Path) -> None:
    jsonl(tmp_path / "set", RECORDS)
    sources = {
        "file": {"path": "set/train.jsonl"},
        "inline": {"records": RECORDS},
        "hub": {"name": "set", "split": "train"},
    }
    values = []
    for source, keys in sources.items():
        experiment = read_experiment(write({"source": source, **keys, **LAYOUT}, source))
        run(experiment, tmp_path / "runs" / source)
        opened = attnscope.open_run(tmp_path / "runs" / source)
        assert opened.prompts["order"].to_list() == [1, 2, 1]
        assert "text" not in opened.prompts.columns
        values.append(opened.values.collect())
    assert values[0].equals(values[1])
    assert values[0].equals(values[2])
    shutil.rmtree(tmp_path / "set")  # a run does not need its source
    for source in ("inline", "hub"):
        stored = read_experiment(tmp_path / "runs" / source / "experiment.yaml")
        run(stored, tmp_path / "again" / source)
        assert bytes_of(tmp_path / "again" / source) == bytes_of(tmp_path / "runs" / source)
        assert str(tmp_path) not in (tmp_path / "runs" / source / "experiment.yaml").read_text()


def test_the_short_form_is_a_list(write: Any, tmp_path: Path) -> None:
    texts = ["Tom has no apples.", "Ann has two."]
    file = write(texts)
    file.write_text(file.read_text().replace("- chosen", "- question"))
    experiment = read_experiment(file)
    assert experiment.prompts.model_dump()["records"] == tuple(texts)
    plan = make_plan(experiment)
    assert [cell.tokens.prompt.text for cell in plan.models[0].cells()] == texts
    assert [cell.tokens.prompt.names for cell in plan.models[0].cells()] == [("question",)] * 2


@pytest.mark.parametrize(
    ("prompts", "code"),
    [
        ([], "bad-value"),
        (["A text.", 3], "bad-value"),
        ({"source": "inline", "records": []}, "bad-value"),
        ({"source": "hub", "name": "set"}, "missing-key"),
        ({"source": "hub", "name": "set", "split": "train", "splits": 1}, "unknown-key"),
        ({"source": "hub", "name": "/etc", "split": "train"}, "path-outside-folder"),
    ],
)
def test_wrong_sources_are_refused(write: Any, prompts: Any, code: str) -> None:
    with pytest.raises(InputError) as error:
        read_experiment(write(prompts))
    assert error.value.code == code, error.value


def test_a_changed_data_set_is_refused(write: Any, tmp_path: Path) -> None:
    jsonl(tmp_path / "set", RECORDS)
    hub = {"source": "hub", "name": "set", "split": "train", **LAYOUT}
    digest = make_plan(read_experiment(write(hub))).stored.prompts.model_dump()["digest"]
    jsonl(tmp_path / "set", RECORDS[:2])
    with raises(InputError, "file-changed", expected=digest):
        make_plan(read_experiment(write({**hub, "digest": digest})))
    with raises(InputError, "too-few-prompts", prompts=2, count=3):
        make_plan(read_experiment(write({**hub, "count": 3})))
