"""An experiment file: what it means, and how it says what is wrong."""

from pathlib import Path

import pydantic
import pytest
import yaml

from attnscope.errors import InputError
from attnscope.spec.conditions import ArmSpec, Condition, Insert, KnockoutSpec, Replace, SteerSpec
from attnscope.spec.experiment import Experiment, Profiles, make_experiment
from attnscope.spec.experiment_yaml import experiment_to_yaml, read_experiment
from attnscope.spec.generate import Generate
from support_errors import raises

GOOD = """\
name: slashes
models: [first, second]
prompts: {source: math, count: 8}
conditions:
  base: {}
  filler:
    insert: {kind: repeat, unit: /, count: 55}
layers: [0]
measures: [mass, lambda]
"""


def read(tmp_path: Path, text: str):
    file = tmp_path / "experiment.yaml"
    file.write_text(text, encoding="utf-8")
    return read_experiment(file)


def test_defaults_are_written_out(tmp_path):
    experiment = read(tmp_path, GOOD)
    complete = yaml.safe_load(experiment_to_yaml(experiment))
    assert set(complete) == set(type(experiment).model_fields)
    assert complete["models"] == {"first": "first", "second": "second"}
    assert complete["conditions"]["filler"] == {
        "insert": {"kind": "repeat", "unit": "/", "count": 55, "seed": 0},
        "position": "between",
        "by": "text",
        **dict.fromkeys(("replace", "system", "chat", "template", "bos", "image", "random")),
        **dict.fromkeys(("knockout", "steer", "arm")),
    }
    assert experiment.base == "base"
    assert experiment.variants == ("filler",)


def test_what_is_written_reads_back_the_same(tmp_path):
    experiment = read(tmp_path, GOOD)
    again = read(tmp_path, experiment_to_yaml(experiment))
    assert again == experiment
    assert hash(again) == hash(experiment)
    assert again.digest == experiment.digest


def test_an_experiment_cannot_be_changed(tmp_path):
    experiment = read(tmp_path, GOOD)
    with pytest.raises(pydantic.ValidationError):
        experiment.seed = 1


@pytest.mark.parametrize(
    ("old", "new"),
    [("count: 8", "count: 9"), ("layers: [0]", "layers: [1]"), ("unit: /", "unit: '?'")],
)
def test_the_digest_knows_every_key(tmp_path, old, new):
    assert read(tmp_path, GOOD).digest != read(tmp_path, GOOD.replace(old, new)).digest


def test_a_key_that_came_later_leaves_old_questions_what_they_were(tmp_path):
    """A run of a build before `bin` opens: its question had no such key."""
    experiment = read(tmp_path, GOOD)
    assert "bin" in experiment.to_dict()
    assert "bin" not in experiment.identity()
    assert experiment.with_keys(bin=2).identity()["bin"] == 2
    assert experiment.with_keys(bin=2).digest != experiment.digest


def test_the_digest_knows_the_rules_of_a_class_file(tmp_path):
    rules = tmp_path / "mine.yaml"
    digests = set()
    for sign in "#*":
        rules.write_text(f"classes: [{{name: sign, characters: '{sign}'}}]")
        digests.add(read(tmp_path, GOOD + "classes: mine.yaml\n").digest)
    assert len(digests) == 2


def test_paths_are_relative_to_the_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("classes: [hash]")
    text = GOOD.replace("{source: math, count: 8}", "{source: file, path: some.jsonl}")
    experiment = read(tmp_path, text + "classes: [default, mine.yaml]\n")
    assert experiment.prompts.path == str(tmp_path / "some.jsonl")
    assert list(experiment.classes) == ["default", "mine"]


WRONG = [
    ("layers:", "layer:", 8, "unknown-key", "layer"),
    ("count: 8", "cuont: 8", 3, "unknown-key", "prompts.cuont"),
    ("count: 55", "coutn: 55", 7, "unknown-key", "conditions.filler.insert.coutn"),
    ("insert:", "insrt:", 7, "unknown-key", "conditions.filler.insrt"),
    ("kind: repeat", "kind: slash", 7, "unknown-kind-of-filler", "slash"),
    ("lambda]", "lamda]", 9, "unknown-measure", "lamda"),
    ("lambda]", "[lambda]]", 9, "unknown-measure", ["lambda"]),
    ("lambda]", "{lambda: }]", 9, "unknown-measure", {"lambda": None}),
    ("source: math", "source: maths", 3, "unknown-source", "maths"),
    ("count: 8", "count: eight", 3, "bad-value", "eight"),
    ("count: 8", "count: 0", 3, "bad-value", 0),
    ("count: 8", "level: 9", 3, "unknown-level", 9),
    ("layers: [0]", "layers: [0, -1]", 8, "bad-numbers", [0, -1]),
    ("layers: [0]", "layers: first", 8, "bad-numbers", "first"),
    ("layers: [0]", "queries: generatd", 8, "unknown-queries", "generatd"),
    ("layers: [0]", "queries: sample:2", 8, "bad-sample-size", "sample:2"),
    ("layers: [0]", "classes: maps2", 8, "unknown-class-set", "maps2"),
    ("layers: [0]", f"classes: {'a' * 300}", 8, "unknown-class-set", "a" * 300),
    ("layers: [0]", "classes: [maps, maps, 1]", 8, "listed-twice", "maps"),
    ("layers: [0]", "dtype: int8", 8, "bad-value", "int8"),
    ("layers: [0]", "layers: [0]\nprofiles: {layers: [1]}", 1, "not-measured", 1),
    ("layers: [0]", "heads: {third: [0]}", 1, "unknown-label", ["third"]),
    ("name: slashes", "name: a/b", 1, "bad-value", "a/b"),
    ("name: slashes", "title: slashes", 1, "unknown-key", "title"),
    ("models: [first, second]", "models: [first, first]", 1, "listed-twice", "first"),
]


@pytest.mark.parametrize(("old", "new", "line", "code", "value"), WRONG)
def test_an_error_has_the_line_and_the_bad_value(tmp_path, old, new, line, code, value):
    assert old in GOOD
    with raises(InputError, code, line=line, value=value):
        read(tmp_path, GOOD.replace(old, new))


def test_one_condition_changes_nothing(tmp_path):
    with raises(InputError, "not-one-base", conditions=[], line=1):
        read(tmp_path, GOOD.replace("  base: {}", "  base: {insert: {}}"))


@pytest.mark.wording
def test_an_error_names_the_line_the_bad_value_and_the_good_ones(tmp_path):
    with pytest.raises(InputError) as caught:
        read(tmp_path, GOOD.replace("layers:", "layer:"))
    message = str(caught.value)
    for part in ("experiment.yaml, line 8: ", "'layer'", "did you mean 'layers'?", "measures"):
        assert part in message


@pytest.mark.parametrize(
    ("keys", "key", "known"),
    [
        ("conditions: {base: {}, insert: {knockout: {tokn: a}}}", "tokn", KnockoutSpec),
        ("conditions: {base: {}, a: {steer: {factr: 2}}}", "factr", SteerSpec),
        ("conditions: {base: {}, a: {arm: {d: 1}}}", "d", ArmSpec),
        ("conditions: {base: {}, a: {insert: {d: 1}}}", "d", Insert),
        ("conditions: {base: {}, a: {replace: {d: 1}}}", "d", Replace),
        ("conditions: {base: {}, insert: {d: 1}}", "d", Condition),
        ("profiles: {d: 1}", "d", Profiles),
        ("generate: {d: 1}", "d", Generate),
        ("d: 1", "d", Experiment),
    ],
)
def test_an_unknown_key_lists_the_keys_of_its_own_place(tmp_path, keys, key, known):
    with pytest.raises(InputError) as error:
        read(tmp_path, "name: x\nmodels: [a]\nprompts: {source: math}\n" + keys)
    assert error.value.code == "unknown-key"
    assert error.value.values["value"].rpartition(".")[2] == key
    assert error.value.values["known"] == list(known.model_fields)


def test_all_errors_are_listed_at_once(tmp_path):
    with pytest.raises(InputError) as caught:
        read(tmp_path, GOOD.replace("layers:", "layer:").replace("lambda]", "lamda]"))
    assert str(caught.value).count("line") == 2


def test_a_key_that_is_there_twice(tmp_path):
    with raises(InputError, "key-given-twice", value="layers", line=10, first=8):
        read(tmp_path, GOOD + "layers: [1]\n")


def test_broken_yaml_names_its_line(tmp_path):
    with raises(InputError, "broken-yaml", line=3):
        read(tmp_path, "name: x\nmodels: [a\nprompts: {}\n")


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words"])
def test_not_a_mapping(tmp_path, text):
    with raises(InputError, "not-a-mapping"):
        read(tmp_path, text)


def test_no_such_file(tmp_path):
    with raises(InputError, "file-missing"):
        read_experiment(tmp_path / "nothing.yaml")


BASE = {"name": "x", "models": {"a": "a"}, "prompts": {"source": "math"}}


def test_pair_measures_need_a_pair():
    with raises(InputError, "no-variant", measure="lambda"):
        make_experiment(**BASE, measures=["lambda"])


def test_flow_needs_whole_tokens():
    with raises(InputError, "class-set-by-fraction", value="maps"):
        make_experiment(**BASE, measures=["flow"], classes=["maps"])


def test_every_prompt_has_a_sentence_of_its_own():
    insert = {"kind": "sentence", "count": 5, "seed": 3}
    experiment = make_experiment(**BASE, conditions={"base": {}, "more": {"insert": insert}})
    assert [experiment.conditions["more"].insert.filler(n).seed for n in (0, 1, 7)] == [3, 4, 10]


def test_the_base_is_chosen_in_one_place():
    empty = {"name": "x", "models": ["zoo:math-qwen2"], "prompts": {"source": "math"}}
    conditions = {"none": {"insert": {"count": 0}}, "plain": {}}
    experiment = make_experiment(**empty, conditions=conditions)
    assert experiment.base == "plain"  # inserting nothing is a variant like any other
    assert experiment.variants == ("none",)
    assert experiment.to_dict()["base"] == "plain"
    with raises(InputError, "unknown-base", value="other", known=["none", "plain"]):
        make_experiment(**empty, conditions=conditions, base="other")
    with raises(InputError, "base-changes-something", value="none", known=["plain"]):
        make_experiment(**empty, conditions=conditions, base="none")


FIRST_FORMAT = """\
name: filler-profile
models: {math-qwen2: zoo:math-qwen2}
prompts: {source: math, count: 2, seed: 0, level: null}
chat: true
conditions:
  base: {insert: null, position: between, by: text}
  filler: {insert: {kind: repeat, unit: /, count: 55, seed: 0}, position: between, by: ids}
layers: [0, 1, 2]
heads: all
queries: [all]
keys: [all, not-first]
classes: [default]
measures: [profile, uniformity, value_similarity, lambda, affine, mass, entropy, first_token]
profiles: {layers: [0], heads: {math-qwen2: [0, 1, 7]}}
combine: mean
normalise: mass
seed: 0
dtype: auto
device: null
backend: auto
batch_tokens: 8192
"""


def test_the_question_of_a_run_of_the_first_format_is_still_good(tmp_path):
    """Such runs are refused, with the advice to run their question again."""
    (tmp_path / "experiment.yaml").write_text(FIRST_FORMAT)
    experiment = read_experiment(tmp_path / "experiment.yaml")
    assert experiment.base == "base"
    assert experiment.classes["default"].names
    assert experiment.profiles.heads_of("math-qwen2") == (0, 1, 7)


def test_an_old_key_is_refused_with_its_new_name(tmp_path):
    keys = {"name": "x", "models": ["zoo:math-qwen2"], "prompts": {"source": "math"}}
    with raises(InputError, "renamed-key", value="cut", new="truncate"):
        make_experiment(**keys, cut=3)
    (tmp_path / "experiment.yaml").write_text(HEAD + "cut: 3\n")
    with raises(InputError, "renamed-key", value="cut", new="truncate"):
        read_experiment(tmp_path / "experiment.yaml")


def test_both_spellings_of_normalise(tmp_path):
    (tmp_path / "experiment.yaml").write_text(HEAD + "normalize: lift\n")
    experiment = read_experiment(tmp_path / "experiment.yaml")
    assert experiment.normalise == "lift"
    assert experiment.with_keys(normalize="share").normalise == "share"
    (tmp_path / "experiment.yaml").write_text(HEAD + "normalize: lift\nnormalise: lift\n")
    with raises(InputError, "key-given-twice", value="normalize"):
        read_experiment(tmp_path / "experiment.yaml")


def test_classes_are_kept_as_rules(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "classes:\n- hash\n- {name: ids, token_ids: [3, 1]}\n- {name: other, every: token}\n"
    )
    (tmp_path / "experiment.yaml").write_text(
        "name: x\nmodels: [zoo:math-qwen2]\nprompts: {source: math}\n"
        "classes: [default, mine.yaml]\n"
    )
    experiment = read_experiment(tmp_path / "experiment.yaml")
    (tmp_path / "mine.yaml").unlink()
    (tmp_path / "experiment.yaml").write_text(experiment_to_yaml(experiment))
    again = read_experiment(tmp_path / "experiment.yaml")  # needs no other file
    assert again == experiment
    assert again.digest == experiment.digest
    assert again.to_dict()["classes"]["mine"] == [
        {"name": "hash", "characters": "#", "strip": True},
        {"name": "ids", "token_ids": [1, 3]},
        {"name": "other", "every": "token"},
    ]
    assert str(tmp_path) not in experiment_to_yaml(experiment)


def test_what_readers_choose_is_not_what_is_measured():
    one = make_experiment(name="x", models=["zoo:math-qwen2"], prompts={"source": "math"})
    other = one.with_keys(combine="max", normalise="lift")
    assert one.digest == other.digest
    assert one.digest != one.with_keys(seed=1).digest


HEAD = "name: x\nmodels: [zoo:math-qwen2]\nprompts: {source: math}\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (HEAD + "? [a, b]\n: c\n", "yaml-key"),
        (HEAD.replace("[zoo:math-qwen2]", "[1, '1']"), "bad-model-name"),
        (HEAD + "keys: " + "[" * 500 + "]" * 500, "yaml-too-deep"),
        (HEAD.replace("name: x", "name: &a [*a]"), "yaml-too-deep"),
        (HEAD.replace("name: x", "name: &a [*a, *a]"), "yaml-too-deep"),
        (BOMB + HEAD, "yaml-too-large"),
        (HEAD + "".join(f"k{n}: 1\n" for n in range(300_000)), "yaml-too-large"),
        (HEAD + "device: 'cpu:x'\n", "unknown-device"),
        (HEAD.replace("[zoo:math-qwen2]", '{"\\ud800": zoo:math-qwen2}'), "yaml-value"),
        (HEAD + "seed: " + "1" * 5000, "yaml-value"),
        (HEAD + "seed: " + "1" * 50, "bad-value"),
        (HEAD + "name2: 2023-99-99", "yaml-value"),
        (HEAD.replace("{source: math}", "{source: file, path: ~nosuchuser/x.jsonl}"), "bad-path"),
        (HEAD + "conditions: {base: {}, more: {insert: {count: 1000000000}}}", "bad-value"),
        (HEAD.replace("math}", "spatial, size: 1000000}"), "bad-value"),
        (HEAD.replace("math}", "math, count: 1000000000}"), "bad-value"),
        ("x" * (5 * 2**20), "unreadable-file"),
    ],
)
def test_a_strange_file_is_an_error_at_once(tmp_path, text, code):
    file = tmp_path / "experiment.yaml"
    file.write_text(text)
    with raises(InputError, code):
        read_experiment(file)


def test_half_a_character_from_python():
    with raises(InputError, "lone-surrogate"):
        make_experiment(name="x", models={"\ud800": "zoo:math-qwen2"}, prompts={"source": "math"})


def test_several_units_are_used_in_turn() -> None:
    insert = Insert(unit=("one", "two", "three"), count=1)
    assert [insert.filler(n).repeated for n in range(4)] == ["one", "two", "three", "one"]
    assert Insert.model_validate(insert.model_dump()) == insert
    for bad in ((), ("one", "")):
        with pytest.raises(pydantic.ValidationError):
            Insert(unit=bad)
