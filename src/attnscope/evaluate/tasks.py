"""Tasks: problems with answers that can be checked exactly. Must not know models."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from attnscope.errors import InputError, unknown
from attnscope.prompts import Sample, math_samples, read, spatial_samples

# No seed of any training set.
SEED = 20_260


@dataclass(frozen=True, kw_only=True)
class Task:
    """Problems, and how an answer is judged."""

    name: str
    samples: list[Sample]
    right: Callable[[Sample, str], bool]
    longest: int
    """Tokens that an answer may have."""


def task(name: str, count: int, *, seed: int = SEED, level: int | None = None) -> Task:
    """A bundled task by its name, or the problems of a file with the fields prompt and answer.

    `math` takes the number after "The answer is", or the last number of the answer; `spatial` and
    files the whole answer, less the white space around it.
    """
    if count < 1:
        raise InputError(f"{count} problems: at least one is needed")
    if level is not None and name != "math":
        raise InputError(f"level={level} is of the task math, not of {name}")
    if name == "math":
        problems = list(math_samples(count, seed=seed, level=level))
        return Task(name=name, samples=problems, right=_number, longest=64)
    if name == "spatial":
        problems = list(spatial_samples(count, seed=seed, split="test"))
        return Task(name=name, samples=problems, right=_words, longest=12)
    if not Path(name).is_file():
        raise unknown("task", name, ("math", "spatial", "a file with the fields prompt, answer"))
    return Task(name=name, samples=_from_file(name, count), right=_words, longest=64)


def _from_file(path: str, count: int) -> list[Sample]:
    samples = []
    for n, sample in enumerate(read(path, template="{question}", fields={"question": "prompt"})):
        if n == count:
            break
        answer = sample.answer if sample.answer is not None else sample.facts.get("answer")
        if answer is None:
            raise InputError(f"problem {n} of {path} has no field 'answer' to judge answers by")
        samples.append(Sample(sample.prompt, str(answer), sample.facts))
    if not samples:
        raise InputError(f"{path} has no problems")
    return samples


def _words(sample: Sample, said: str) -> bool:
    return said.strip() == (sample.answer or "").strip()


def _number(sample: Sample, said: str) -> bool:
    named = re.search(r"[Tt]he answer is:?\s*\**(-?\d[\d,]*)", said)
    numbers = [named[1]] if named else re.findall(r"-?\d[\d,]*", said)[-1:]
    return bool(numbers) and numbers[0].replace(",", "").rstrip(",") == sample.answer
