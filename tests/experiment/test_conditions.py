"""Conditions that change what is there: other words, system prompts, templates, no BOS."""

import json

import numpy as np
import pytest

from attnscope.errors import AttnscopeWarning, InputError
from attnscope.experiment.plan import make_plan
from attnscope.spec.experiment import make_experiment
from made_models import save_model
from support_errors import raises

TALK = [
    {"role": "system", "content": "You are a kind teacher."},
    {"role": "user", "content": "Tom has 3 red apples and 4 green apples. How many has he?"},
]
OTHER = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    file = tmp_path_factory.mktemp("talk") / "talk.jsonl"
    file.write_text(json.dumps({"messages": TALK}) + "\n")
    return str(file)


@pytest.fixture
def planned(folder, talk):
    """The base's and the variant's cell under a condition."""

    def make(condition, messages=None, model=folder, **keys):
        asked = {
            "name": "c",
            "models": {"tiny": model},
            "prompts": {"source": "conversations", "path": talk},
            "conditions": {"base": {}, "other": condition},
            "measures": ["mass", "lambda"],
            **keys,
        }
        return make_plan(make_experiment(**asked)).models[0].cells()

    return make


def text_of(cell, indices):
    spans = [cell.tokens.offsets[n] for n in indices]
    return "".join(cell.tokens.prompt.text[a:b] for a, b in spans)


@pytest.mark.parametrize(
    ("condition", "gone", "new"),
    [
        ({"replace": {"old": "apples", "new": "pears"}}, "apples", "pears"),
        ({"replace": {"region": "question", "new": "Why?"}}, "Tom has", "Why?"),
        ({"system": "You are a rude pirate."}, "kind teacher", "rude pirate"),
        ({"system": False}, "kind teacher", None),
        ({"template": OTHER}, None, "[user]"),
        ({"chat": False}, "<|im_start|>", None),
    ],
)
def test_unchanged_tokens_are_aligned(planned, condition, gone, new):
    base, other = planned(condition)
    pair = other.alignment
    assert np.array_equal(base.tokens.ids[pair.base], other.tokens.ids[pair.variant])
    assert (np.diff(pair.base) > 0).all()
    assert (np.diff(pair.variant) > 0).all()
    aligned, boundaries = text_of(base, pair.base), text_of(base, pair.base_boundary)
    text = other.tokens.prompt.text
    if gone is not None:
        assert gone in base.tokens.prompt.text
        assert gone not in text
        assert gone not in aligned
        assert any(part in boundaries for part in gone.split())
    if new is not None:
        assert new in text
        assert new not in aligned
    if "question" not in str(condition):
        assert "3 red" in aligned  # far from every change
        assert len(pair.base) > len(base.tokens) / 3
    assert len(pair.filler) == 0


def test_regions_are_those_of_the_changed_text(planned):
    _, other = planned({"system": "You are a rude pirate."})
    assert other.tokens.prompt.read("system") == "You are a rude pirate."
    assert other.tokens.prompt.read("question") == TALK[1]["content"]
    _, without = planned({"system": False})
    assert "system" not in without.tokens.prompt.names
    _, added = planned({"system": "Be brief."}, prompts={"source": "math", "count": 1}, chat=False)
    assert added.tokens.prompt.read("system") == "Be brief."


def test_without_bos(planned, tmp_path):
    llama = save_model(tmp_path / "llama", "llama")
    base, other = planned({"bos": False}, model=llama, chat=False, bos=True)
    assert np.array_equal(base.tokens.ids[1:], other.tokens.ids)
    assert np.array_equal(other.alignment.base, np.arange(1, len(base.tokens)))
    assert other.alignment.base_boundary.tolist() == [0]
    with raises(InputError, "no-bos-token", prompt=0):
        planned({"bos": False}, model=llama, chat=False)


def test_a_pair_without_aligned_tokens_warns(planned):
    with pytest.warns(AttnscopeWarning, match=r"\b1 of 1\b"):
        planned({"replace": {"region": "turn:1:user", "new": "x"}, "system": "y", "chat": False})


@pytest.mark.parametrize(
    ("condition", "code"),
    [
        ({"replace": {"old": "oranges", "new": "x"}}, "text-not-found"),
        ({"replace": {"region": "maps", "new": "x"}}, "unknown-region"),
        ({"replace": {"new": "x"}}, "bad-replacement"),
        ({"replace": {"old": "kind", "new": "x"}, "system": "y"}, "overlapping-changes"),
        ({"insert": {"count": 3}, "chat": False}, "insert-and-rewrite"),
        ({"template": "x", "chat": False}, "template-without-chat"),
    ],
)
def test_changes_that_cannot_be_made(planned, condition, code):
    with raises(InputError, code):
        planned(condition)


def test_a_conversation_that_ends_with_the_assistant(planned, tmp_path):
    file = tmp_path / "over.jsonl"
    over = [*TALK, {"role": "assistant", "content": "Seven."}]
    file.write_text(json.dumps({"messages": over}))
    prompts = {"source": "conversations", "path": str(file)}
    base, _ = planned({"system": False}, prompts=prompts)
    assert base.tokens.prompt.text.count("assistant") == 1  # none is asked for after it
    with raises(InputError, "ends-with-assistant", prompt=0):
        planned({"system": False}, prompts=prompts, queries="generated")


KEPT = 45


@pytest.mark.parametrize("by", ["text", "ids"])
@pytest.mark.parametrize("position", ["before-system", "between", "end", "random"])
def test_an_insertion_goes_into_the_cut_text(planned, by, position):
    """What is compared is the same stretch of text, with the filler and without."""
    condition = {"insert": {"count": 5, "unit": " one"}, "by": by, "position": position}
    (whole, _) = planned({"insert": {"count": 0}})
    (base, other) = planned(condition, truncate=KEPT)
    assert len(whole.tokens) > KEPT + 8
    assert len(base.tokens) == KEPT
    assert np.array_equal(base.tokens.ids, whole.tokens.ids[:KEPT])
    pair = other.alignment
    new = len(pair.filler) + len(pair.variant_boundary)
    assert 4 <= len(pair.filler) <= new <= 9  # the filler and what sets it off, no more
    assert len(other.tokens) == KEPT - len(pair.base_boundary) + new
    assert len(pair.base) >= KEPT - 1  # all of the base but for the place itself
    kept = np.delete(other.tokens.ids, [*pair.filler, *pair.variant_boundary])
    assert np.array_equal(kept, base.tokens.ids[pair.base])
    text = "" if position == "before-system" else base.tokens.prompt.text[:5]
    assert other.tokens.prompt.text.startswith(text)


def test_what_is_cut_off_has_no_region(planned):
    """Nothing can be inserted there, and no key or query is there."""
    after = {"insert": {"count": 5}, "position": "before:question"}
    for keys in ({"conditions": {"base": {}, "other": after}}, {"keys": ["question"]}):
        with raises(InputError, "unknown-region", value="question"):
            planned({"insert": {"count": 0}}, **{"truncate": 6, **keys})


def test_a_cut_that_leaves_no_text(planned, tmp_path):
    llama = save_model(tmp_path / "llama", "llama")
    condition = {"insert": {"count": 5}, "position": 0}
    with raises(InputError, "nothing-to-insert-into"):
        planned(condition, model=llama, truncate=1, chat=False, bos=True)
