"""Problems with operators, solved again by reading them."""

import re

import pytest

from attnscope.errors import InputError
from attnscope.prompts.equations import equation_samples
from attnscope.prompts.math import LEVELS
from attnscope.tokens.class_sets import DEFAULT
from support_errors import raises


@pytest.mark.parametrize("level", LEVELS)
def test_equations_and_answers_are_right(level: int) -> None:
    questions = set()
    for sample in equation_samples(200, seed=3, level=level):
        question = sample.prompt.read("question")
        found = re.findall(r"(\d+) ([-+×]) (\d+) = (\d+)", question)
        assert len(found) == level + 1
        for first, sign, second, result in found:
            a, b = int(first), int(second)
            assert int(result) == {"+": a + b, "-": a - b, "×": a * b}[sign] > 0
        assert sample.answer == str(sum(int(result) for *_, result in found))
        questions.add(question)
    assert len(questions) > 190


def test_every_problem_has_what_classes_are_compared_by() -> None:
    takes = {one.name: one.takes for one in DEFAULT.classes if one.every is None}
    for sample in equation_samples(50):
        pieces = re.findall(r"\w+|\S", sample.prompt.read("question"))
        for name in ("digit", "operator", "conjunction", "word"):
            assert any(takes[name](piece) for piece in pieces), (name, pieces)


def test_levels_take_turns_and_seeds_differ() -> None:
    first = [sample.prompt for sample in equation_samples(20, seed=1)]
    assert first == [sample.prompt for sample in equation_samples(20, seed=1)]
    assert first != [sample.prompt for sample in equation_samples(20, seed=2)]
    assert first[0].names == ("system", "question")
    levels = [sample.metadata["level"] for sample in equation_samples(6)]
    assert levels == [1, 2, 3, 4, 5, 1]


def test_bad_input_says_what_is_wrong() -> None:
    with raises(InputError, "unknown-level", value=6, known=[1, 2, 3, 4, 5]):
        next(equation_samples(1, level=6))
    with raises(InputError, "bad-count", value=-2):
        next(equation_samples(-2))
