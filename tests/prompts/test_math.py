"""Word problems, solved again by reading them."""

import re
from fractions import Fraction

import pytest

from attnscope.errors import InputError
from attnscope.prompts.math import LEVELS, math_samples
from support_errors import raises


def solve(question: str) -> Fraction:
    """Read the problem sentence by sentence, as a pupil would."""
    number = Fraction(0)
    for sentence in re.findall(r"[^.?]+[.?]", question):
        numbers = [int(found) for found in re.findall(r"\d+", sentence)]
        if "more than" in sentence:
            number = number + (number + numbers[0])
        elif "How many" in sentence:
            return number
        elif " has " in sentence:
            number = Fraction(numbers[0])
        elif " buys " in sentence:
            number += numbers[0]
        elif " gives " in sentence:
            number -= numbers[0]
        elif "times as many" in sentence:
            number *= numbers[0]
        elif "boxes" in sentence:
            number /= numbers[0]
        elif "percent" in sentence:
            number *= Fraction(100 - numbers[0], 100)
        else:
            raise AssertionError(sentence)
    raise AssertionError(question)


@pytest.mark.parametrize("level", LEVELS)
def test_answers_are_right(level: int) -> None:
    questions = set()
    for sample in math_samples(400, seed=3, level=level):
        question = sample.prompt.read("question")
        assert sample.answer == str(solve(question))
        assert int(sample.answer) > 0
        assert len(sample.metadata["quantities"]) == level + 1
        questions.add(question)
    assert len(questions) > 300


def test_levels_take_turns_and_add_kinds_of_steps() -> None:
    samples = list(math_samples(500))
    assert [sample.metadata["level"] for sample in samples[:6]] == [1, 2, 3, 4, 5, 1]
    for level, words in ((2, "times|boxes|percent|together"), (3, "percent|together"), (4, "toge")):
        texts = " ".join(s.prompt.text for s in samples if s.metadata["level"] <= level)
        assert not re.search(words, texts)
    texts = " ".join(s.prompt.text for s in samples if s.metadata["level"] == 5)
    assert all(word in texts for word in ("times", "boxes", "percent", "together"))


def test_regions_and_seeds() -> None:
    first = [sample.prompt for sample in math_samples(20, seed=1)]
    assert first == [sample.prompt for sample in math_samples(20, seed=1)]
    assert first != [sample.prompt for sample in math_samples(20, seed=2)]
    assert first[0].names == ("system", "question")


def test_bad_input_says_what_is_wrong() -> None:
    with raises(InputError, "unknown-level", value=6, known=[1, 2, 3, 4, 5]):
        next(math_samples(1, level=6))
    with raises(InputError, "bad-count", value=-2):
        next(math_samples(-2))
