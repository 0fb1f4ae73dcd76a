"""Problems written with operators, for a seed: sums, differences and products with their results,
joined by conjunctions, and a question about all of them.

Every prompt has digits, operators, conjunctions and words, so that classes of tokens can be held
against one another prompt by prompt; word problems (`math.py`) have no operators.
"""

from collections.abc import Iterator
from random import Random

from attnscope.prompts.math import NAMES, SYSTEM, THINGS, of_levels
from attnscope.prompts.sample import Sample, compose
from attnscope.tokens.regions import join


def equation_samples(count: int, *, seed: int = 0, level: int | None = None) -> Iterator[Sample]:
    """`count` problems, the same for a seed; of one level, or of all levels in turn. A level has
    one person more than its number.

    The regions are `system` and `question`; `metadata` has the `level` and the `quantities` that
    are added up.
    """
    return of_levels("equations", _problem, count, seed=seed, level=level)


def _problem(draw: Random, level: int) -> Sample:
    things = draw.choice(THINGS)
    clauses, quantities = [], []
    for name in draw.sample(NAMES, level + 1):
        written, number = _equation(draw)
        clauses.append(f"{name} has {written} {things}")
        quantities.append(number)
    statement = " and ".join(clauses)
    question = f"If {statement}, then how many {things} do they have together?"
    prompt = compose(SYSTEM, join([("question", question)]))
    metadata = {"level": level, "quantities": tuple(quantities)}
    return Sample(prompt, str(sum(quantities)), metadata)


def _equation(draw: Random) -> tuple[str, int]:
    """As it is written, and its result."""
    sign = draw.choice("+-×")
    if sign == "×":
        first, second = draw.randint(2, 12), draw.randint(2, 12)
        number = first * second
    else:
        first, second = draw.randint(20, 90), draw.randint(2, 19)
        number = first + second if sign == "+" else first - second
    return f"{first} {sign} {second} = {number}", number
