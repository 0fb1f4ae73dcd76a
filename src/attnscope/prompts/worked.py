"""Worked solutions: a word problem, and its solution in many short sentences, for a seed.

The solution makes a plan, goes through the steps with the numbers on the way, checks them from the
end, and states the answer, as a model does that reasons in writing. All numbers are right.
"""

from collections.abc import Iterator
from random import Random

from attnscope.prompts.math import math_samples
from attnscope.tokens.regions import Prompt

LEVEL = 5
"""Problems with the largest number of steps."""
_PLANS = (
    "Okay, let me think about this problem. I will go through it from the beginning.",
    "Let me read the problem again. It gives a first number and then several changes.",
    "So I have to find one number. I should keep every number on the way.",
)
_DOUBTS = (
    "Wait, let me make sure that I read this right.",
    "Hmm, that seems plausible.",
    "Let me write this down.",
    "This follows from the problem.",
)


def worked_solutions(count: int, *, seed: int = 0) -> Iterator[dict[str, str]]:
    """Records with `question` and `solution`."""
    for number, sample in enumerate(math_samples(count, seed=seed, level=LEVEL)):
        question = _question(sample.prompt)
        numbers = list(sample.metadata["quantities"])
        draw = Random(f"worked:{seed}:{number}")
        yield {"question": question, "solution": " ".join(_solution(draw, question, numbers))}


def _question(prompt: Prompt) -> str:
    (region,) = (one for one in prompt.regions if one.name == "question")
    return prompt.text[region.start : region.end]


def _solution(draw: Random, question: str, numbers: list[int]) -> Iterator[str]:
    """The sentences. The question has the start, a change for each further number but the last,
    and two sentences about both persons."""
    start, *changes = [f"{one}." for one in question.split(". ")[:-2]]
    *on_the_way, total = numbers
    yield draw.choice(_PLANS)
    yield f"First, {start}"
    yield f"There are {len(changes)} changes after that."
    for n, change in enumerate(changes):
        before, after = on_the_way[n], on_the_way[n + 1]
        yield f"The next change is number {n + 1}: {change}"
        yield f"Before it, the number was {before}."
        yield draw.choice(_DOUBTS)
        yield f"It goes from {before} to {after}, so now there are {after}."
    last = on_the_way[-1]
    more = total - 2 * last
    yield f"All {len(changes)} changes are done, and {last} are left."
    yield f"The other person has {more} more than that, which is {last} + {more} = {last + more}."
    yield f"Together they have {last} + {last + more} = {total}."
    yield "Let me check this from the end."
    for n in reversed(range(len(changes))):
        before, after = on_the_way[n], on_the_way[n + 1]
        yield f"Change number {n + 1} led to {after}, and it started at {before}."
    yield "All numbers agree with the problem."
    yield f"The answer is {total}."
