"""The experiments in examples/: complete, valid, and asking for every choice they promise."""

from pathlib import Path

import pytest

from attnscope.spec.experiment_yaml import read_experiment

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_is_valid_and_named_as_its_file(path: Path) -> None:
    experiment = read_experiment(path)
    assert experiment.name == path.stem
    assert all(name.startswith("zoo:") for name in experiment.models.values())
    assert path.read_text().startswith("# ")


def test_token_types_ask_for_every_choice() -> None:
    asked = read_experiment(EXAMPLES / "sensitivity-token-types.yaml")
    assert asked.queries == ("all", "last", "after:maps")
    assert asked.keys == ("maps", "all")
    assert list(asked.classes) == ["maps", "default"]
    assert "mass" in asked.measures
    assert len(asked.models) == 2
    assert asked.prompts.count == 24


def test_fillers_ask_for_every_length_kind_and_position() -> None:
    asked = read_experiment(EXAMPLES / "sensitivity-filler.yaml")
    inserts = [(c.insert, c.position) for c in asked.conditions.values() if c.insert is not None]
    slashes = [(i, at) for i, at in inserts if i.kind == "repeat" and i.unit == "/"]
    assert {i.count for i, at in slashes if at == "between"} == {10, 25, 40, 55, 70}
    assert {at for i, at in slashes if i.count == 55} == {"between", "end", "before-system"}
    assert {(i.kind, i.unit) for i, at in inserts if i.count == 55 and at == "between"} == {
        ("repeat", "/"),
        ("repeat", "?"),
        ("word", "he"),
        ("random-tokens", None),
        ("sentence", None),
    }
    # The published one is the reference, so it stands first.
    assert asked.variants[0] == "slash-55"
    assert {"lambda", "uniformity", "affine"} <= set(asked.measures)
