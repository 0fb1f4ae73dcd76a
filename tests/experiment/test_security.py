"""What a file from another person cannot do. SECURITY.md lists what is promised."""

import importlib.util
from pathlib import Path

import pytest

from attnscope.errors import InputError
from attnscope.prompts import datasets, read
from attnscope.spec.experiment_yaml import read_experiment
from support_errors import raises

ASKED = (
    "name: x\nmodels: [a]\nmeasures: mass\n"
    "prompts: {{source: file, path: {path}}}\nclasses: [{classes}]\n"
)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path):
    """An experiment's folder, beside files that are none of its business."""
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path, tmp_path / "mine"):
        (folder / "p.jsonl").write_text('{"question": "a"}\n')
        (folder / "c.yaml").write_text("classes: [digit, {name: other, every: token}]\n")
    (tmp_path / "mine" / "link.jsonl").symlink_to(tmp_path / "p.jsonl")
    (tmp_path / "mine" / "loop.jsonl").symlink_to(tmp_path / "mine" / "loop.jsonl")
    return tmp_path / "mine"


def ask(place, path="p.jsonl", classes="default", **options):
    (place / "e.yaml").write_text(ASKED.format(path=path, classes=classes))
    return read_experiment(place / "e.yaml", **options)


def test_an_experiment_reads_its_own_folder(place):
    experiment = ask(place, "p.jsonl", "c.yaml")
    assert experiment.prompts.path == str(place / "p.jsonl")
    assert ask(place, f"{place}/p.jsonl").prompts.path == str(place / "p.jsonl")


@pytest.mark.parametrize("path", ["../p.jsonl", "/etc/hostname", "~/x.jsonl", "link.jsonl"])
def test_prompts_outside_are_refused_unless_allowed(place, path):
    with raises(InputError, "path-outside-folder", key="prompts.path", value=path):
        ask(place, path)
    assert Path(ask(place, path, outside=True).prompts.path).name == Path(path).name


def test_classes_outside_are_refused_unless_allowed(place):
    with raises(InputError, "path-outside-folder", key="classes", value="../c.yaml"):
        ask(place, classes="../c.yaml")
    assert (
        "other" in next(iter(ask(place, classes="../c.yaml", outside=True).classes.values())).names
    )


def test_a_link_that_leads_to_itself_is_no_file(place):
    with pytest.raises(InputError):
        ask(place, "loop.jsonl")


def test_prompts_and_lines_have_bounds(tmp_path, monkeypatch):
    file = tmp_path / "p.jsonl"
    file.write_text('{"question": "' + "a" * 2000 + '"}\n')
    monkeypatch.setattr(datasets, "LONGEST", 1000)
    with raises(InputError, "prompt-too-long", characters=2000, limit=1000):
        list(read(file))
    monkeypatch.setattr(datasets, "LONGEST_LINE", 1500)
    with raises(InputError, "line-too-long", limit=1500):
        list(read(file))


def test_the_audit_lists_another_version():
    spec = importlib.util.spec_from_file_location("audit", ROOT / "tools" / "check_pins.py")
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    assert audit.differing("# a word\npytest==0.0.1\nno-such-package==1\n")[0].startswith(
        "pytest is"
    )
    assert audit.differing("no-such-package==1\n") == []


def test_every_test_that_security_names_is_there():
    import re

    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    files = set(re.findall(r"tests/[\w/]+\.py", page))
    assert len(files) > 5
    source = "".join((ROOT / name).read_text(encoding="utf-8") for name in files)
    for name in re.findall(r"`(test_\w+)`", page):
        assert f"def {name}(" in source
