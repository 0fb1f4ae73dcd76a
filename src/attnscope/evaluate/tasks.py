"""Tasks: problems with answers that can be checked exactly. Must not know models."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
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

    `math` takes the number after "The answer is", or the last number of the answer, and compares
    its value: 12.00, $12 and 24/2 are 12. `spatial` and files compare the whole answer, without
    the white space around it.
    """
    if count < 1:
        raise InputError(
            f"problems={count}: it must be at least 1", code="bad-problems", problems=count
        )
    if level is not None and name != "math":
        raise InputError(
            f"level={level}: only the task math has levels, not {name}; leave it out",
            code="unsupported-argument",
            level=level,
            task=name,
        )
    if name == "math":
        problems = list(math_samples(count, seed=seed, level=level))
        return Task(name=name, samples=problems, right=_number, longest=64)
    if name == "spatial":
        problems = list(spatial_samples(count, seed=seed, split="test"))
        return Task(name=name, samples=problems, right=_words, longest=12)
    if not Path(name).is_file():
        harness = f"lm-eval:{name}"
        known = ("math", "spatial", "a file with the fields prompt, answer", harness)
        raise unknown("task", name, known)
    return Task(name=name, samples=_from_file(name, count), right=_words, longest=64)


def _from_file(path: str, count: int) -> list[Sample]:
    samples = []
    for n, sample in enumerate(read(path, template="{question}", fields={"question": "prompt"})):
        if n == count:
            break
        answer = sample.answer if sample.answer is not None else sample.metadata.get("answer")
        if answer is None:
            raise InputError(
                f"problem {n} of {path} has no field 'answer'; add the right answer",
                code="missing-field",
                field="answer",
                problem=n,
            )
        samples.append(Sample(sample.prompt, str(answer), sample.metadata))
    if not samples:
        raise InputError(f"{path} has no problems", code="empty-file", path=path)
    return samples


def _words(sample: Sample, said: str) -> bool:
    return said.strip() == (sample.answer or "").strip()


# Digits, with commas or without, then decimals and an exponent: 12, 1,200, 12.50, .5, 1.2e1.
_UNSIGNED = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]{1,2}(?![0-9]))?"
)
# A minus behind a letter, a digit or a bracket is an operator: 24-12 has no negative number.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w).])[-\u2212])?[$€£]?(?P<late_sign>[-\u2212](?<=[$€£].))?"
    rf"(?:(?P<whole>[0-9]+)\s+(?=[0-9]+/[0-9]))?(?P<top>{_UNSIGNED})"
    rf"(?:\s*/\s*(?P<bottom>{_UNSIGNED}))?"
)
_NAMED = re.compile(r"[Tt]he answer is:?[\s*]*(?=[-\u2212$€£.0-9])")


def _number(sample: Sample, said: str) -> bool:
    """Whether the number after "The answer is", or the last one, has the right value."""
    named = _NAMED.search(said)
    found = _NUMBER.match(said, named.end()) if named else None
    numbers = [found] if found else list(_NUMBER.finditer(said))
    return bool(numbers) and _value(numbers[-1]) == Fraction(sample.answer or "")


def _value(number: re.Match[str]) -> Fraction | None:
    """The exact value; None of a division by 0, and of more digits than any answer has."""
    parts = [(number[name] or "").replace(",", "") for name in ("whole", "top", "bottom")]
    if max(map(len, parts)) > 100:
        return None
    whole, top, bottom = (
        Fraction(part or default) for part, default in zip(parts, "001", strict=True)
    )
    if not bottom:
        return None
    value = whole + top / bottom
    return -value if number["sign"] or number["late_sign"] else value
