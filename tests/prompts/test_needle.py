"""A needle in a haystack, and documents in order."""

import json

import pytest

from attnscope.errors import InputError
from attnscope.prompts import document_samples, needle_samples, read
from attnscope.spec.experiment import make_experiment
from support_errors import raises


def test_a_needle_stands_at_its_depth():
    for sample in needle_samples(depths=[0.0, 0.5, 1.0], lengths=[60, 200]):
        prompt = sample.prompt
        document, needle = prompt.spans("document")[0], prompt.spans("needle")[0]
        hay = (document.end - document.start) - (needle.end - needle.start)
        at = (needle.start - document.start) / hay
        assert at == pytest.approx(sample.metadata["depth"], abs=0.15)
        words = len(prompt.read("document").split()) - len(prompt.read("needle").split())
        assert sample.metadata["length"] <= words < sample.metadata["length"] + 20
        assert sample.answer == prompt.read("answer")
        assert prompt.read("answer") in prompt.read("needle")
        assert prompt.text.count(prompt.read("answer")) == 1
        assert prompt.text.endswith(prompt.read("question"))


def test_prompts_take_their_turns():
    samples = list(needle_samples(6, depths=[0, 1], lengths=[20, 40]))
    assert [(s.metadata["depth"], s.metadata["length"]) for s in samples[:4]] == [
        (0, 20),
        (1, 20),
        (0, 40),
        (1, 40),
    ]
    assert samples[4].metadata["depth"] == 0
    assert samples[4].prompt.text != samples[0].prompt.text


def test_a_haystack_of_ones_own(tmp_path):
    file = tmp_path / "hay.txt"
    file.write_text("One straw. Two straws! Three straws?")
    mine = {"needle": "It is 7.", "question": "Which number?", "answer": "7"}
    (sample,) = needle_samples(path=file, depths=[0.5], lengths=[6], **mine)
    assert sample.prompt.text == "One straw. Two straws! It is 7. Three straws?\n\nWhich number?"
    with raises(InputError, "text-too-short", words=6, needed=7):
        list(needle_samples(path=file, lengths=[7]))


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"needle": "It is 7."}, "incomplete-needle"),
        ({"needle": "It is 7.", "question": "?", "answer": "8"}, "answer-not-in-needle"),
        ({"depths": [1.5]}, "bad-value"),
        ({"lengths": []}, "empty-list"),
    ],
)
def test_what_is_no_needle(keys, code):
    with raises(InputError, code):
        make_experiment(name="n", models=["m"], prompts={"source": "needle", **keys})


def test_a_needle_that_is_not_in_the_text_is_an_error(tmp_path):
    file = tmp_path / "texts.jsonl"
    record = {"question": "The code is 7. What is it?", "needle": "The code is 7."}
    file.write_text(json.dumps(record) + "\n")
    (sample,) = read(file, mark={"needle": "needle"})
    assert sample.prompt.read("needle") == "The code is 7."
    file.write_text(json.dumps(record | {"needle": "The code is 8."}))
    with raises(InputError, "mark-not-found", words="The code is 8."):
        list(read(file, mark={"needle": "needle"}))


def test_documents_are_regions_in_order():
    (sample,) = document_samples(1, documents=4, words=12)
    prompt = sample.prompt
    assert prompt.names == (*(f"document:{n}" for n in range(1, 5)), "question")
    assert all(len(prompt.read(f"document:{n}").split()) >= 12 for n in range(1, 5))


def test_the_stem_ends_before_the_answer() -> None:
    plain, stem = (next(needle_samples(1, stem=on)) for on in (False, True))
    added = stem.prompt.text.removeprefix(plain.prompt.text)
    assert added == "\n\nAnswer: " + plain.metadata["needle"].split(str(plain.answer))[0].rstrip()
    assert stem.prompt.regions == plain.prompt.regions
