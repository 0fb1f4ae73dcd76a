"""Word problems of graded difficulty with exact answers, for a seed.

The level is the number of steps: a person has some things, and each step changes how many.
Levels 1 and 2 add and subtract, from 3 on there is multiplication and fair sharing, from 4 on
percentages, and at level 5 a second person is compared with the first. Every quantity on the way
is a whole number, so the answer is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from attnscope.errors import InputError, unknown
from attnscope.prompts.sample import Sample, compose
from attnscope.tokens.regions import join

LEVELS = (1, 2, 3, 4, 5)
SYSTEM = "Solve the problem step by step and give the answer as a number."
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gita", "Hugo", "Iris", "Jon", "Kim", "Lea")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "seeds", "shells")
_LARGEST = 2000

_Step = tuple[str, int]
"""A sentence, with `{name}` and `{friend}` to fill in, and how many there are after it."""


def math_samples(count: int, *, seed: int = 0, level: int | None = None) -> Iterator[Sample]:
    """`count` problems, the same for a seed; of one level, or of all levels in turn.

    The regions are `system` and `question`; `metadata` has the `level` and the `quantities` on the
    way, from the first to the last.
    """
    return of_levels("math", _problem, count, seed=seed, level=level)


def of_levels(
    source: str,
    problem: Callable[[Random, int], Sample],
    count: int,
    *,
    seed: int,
    level: int | None,
) -> Iterator[Sample]:
    """`count` problems of a source, each with random numbers of its own."""
    if count < 0:
        raise InputError(
            f"cannot make {count} problems; count must be 0 or more", code="bad-count", value=count
        )
    if level is not None and level not in LEVELS:
        raise unknown("level", level, LEVELS)
    for index in range(count):
        of_level = level if level is not None else LEVELS[index % len(LEVELS)]
        yield problem(Random(f"{source}:{seed}:{index}"), of_level)


def _problem(draw: Random, level: int) -> Sample:
    name, friend, other = draw.sample(NAMES, 3)
    things = draw.choice(THINGS)
    number = draw.randint(5, 10 * level + 10)
    sentences = [f"{name} has {number} {things}."]
    quantities = [number]
    for _ in range(level if level < 5 else level - 1):
        sentence, number = _step(draw, level, number)
        sentences.append(sentence.format(name=name, friend=friend))
        quantities.append(number)
    if level < 5:
        sentences.append(f"How many {things} does {name} have now?")
    else:
        more = draw.randint(2, 60)
        sentences.append(f"{other} has {more} {things} more than {name} has now.")
        sentences.append(f"How many {things} do {name} and {other} have together?")
        number = 2 * number + more
        quantities.append(number)
    prompt = compose(SYSTEM, join([("question", " ".join(sentences))]))
    return Sample(prompt, str(number), {"level": level, "quantities": tuple(quantities)})


def _step(draw: Random, level: int, number: int) -> _Step:
    """Some step that this level has and this number allows; buying is always possible."""
    steps = [_buys, _gives]
    if level >= 3:
        steps += [_multiplies, _shares]
    if level >= 4:
        steps += [_sells]
    for kind in draw.sample(steps, len(steps)):
        step = kind(draw, level, number)
        if step is not None:
            return step
    return _buys(draw, level, number)


def _buys(draw: Random, level: int, number: int) -> _Step:
    more = draw.randint(2, 10 * level + 10)
    return f"{{name}} buys {more} more.", number + more


def _gives(draw: Random, level: int, number: int) -> _Step | None:
    if number < 4:
        return None
    number_given = draw.randint(2, number - 1)
    return f"{{name}} gives {number_given} of them to {{friend}}.", number - number_given


def _multiplies(draw: Random, level: int, number: int) -> _Step | None:
    times = draw.randint(2, 5)
    if not 0 < number * times <= _LARGEST:
        return None
    return f"A parcel for {{name}} makes it {times} times as many.", number * times


def _shares(draw: Random, level: int, number: int) -> _Step | None:
    boxes = [n for n in range(2, 10) if number % n == 0 and number > n]
    if not boxes:
        return None
    into = draw.choice(boxes)
    return f"{{name}} packs them evenly into {into} boxes and keeps one box.", number // into


def _sells(draw: Random, level: int, number: int) -> _Step | None:
    shares = [p for p in (10, 20, 25, 50, 75) if number > 0 and number * p % 100 == 0]
    if not shares:
        return None
    percent = draw.choice(shares)
    return f"{{name}} sells {percent} percent of them.", number - number * percent // 100
