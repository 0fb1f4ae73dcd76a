"""Worked solutions and passages: their numbers are right, and relevance is what it says."""

import re

from attnscope.prompts.math import math_samples
from attnscope.prompts.passages import passage_records
from attnscope.prompts.worked import worked_solutions


def test_every_sum_and_the_answer_of_a_solution_are_right() -> None:
    samples = list(math_samples(20, seed=3, level=5))
    for record, sample in zip(worked_solutions(20, seed=3), samples, strict=True):
        solution = record["solution"]
        assert record["question"] in sample.prompt.text
        assert solution.endswith(f"The answer is {sample.answer}.")
        sums = re.findall(r"(\d+) \+ (\d+) = (\d+)", solution)
        assert len(sums) == 2
        assert all(int(a) + int(b) == int(c) for a, b, c in sums)
        steps = re.findall(r"It goes from (\d+) to (\d+), so now there are \2", solution)
        numbers = [steps[0][0], *(after for _, after in steps)]
        assert tuple(map(int, numbers)) == sample.metadata["quantities"][:-1]


def test_only_the_relevant_passage_has_the_name_and_the_place_of_the_query() -> None:
    for record in passage_records(20, seed=3):
        match = re.fullmatch(r"What does (\w+) carry to the (\w+)\?", record["query"])
        assert match is not None
        name, end = match[1], f"to the {match[2]}."
        passages = [record[f"d{n}"] for n in range(1, 11)]
        assert len(set(passages)) == 10
        matches = [n for n, text in enumerate(passages, 1) if name in text and end in text]
        assert matches == [int(record["number"])]
        assert record["relevant"] == passages[matches[0] - 1]
        assert record["distractor"] in set(passages) - {record["relevant"]}
        assert all(text in record["passages"] for text in passages)
