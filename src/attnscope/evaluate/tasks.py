"""Tasks: problems with answers that can be checked exactly."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from attnscope.errors import InputError, unknown
from attnscope.prompts import Sample, math_samples, read, spatial_samples

# The training sets of the bundled models use other seeds.
SEED = 20_260


@dataclass(frozen=True, kw_only=True)
class Task:
    """Problems, and a function that judges completions."""

    name: str
    samples: list[Sample]
    right: Callable[[Sample, str], bool]
    max_new_tokens: int
    """Maximum number of tokens of a completion."""


def load_task(name: str, count: int, *, seed: int = SEED, level: int | None = None) -> Task:
    """A bundled task by its name, or the problems of a file with the fields prompt and answer.

    `math` takes the number after "The answer is", or the last number of the completion, and
    compares its value: 12.00, $12 and 24/2 are 12. `spatial` and files compare the complete text,
    without the whitespace around it.
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
        return Task(name=name, samples=problems, right=_number, max_new_tokens=64)
    if name == "spatial":
        problems = list(spatial_samples(count, seed=seed, split="test"))
        return Task(name=name, samples=problems, right=_text, max_new_tokens=12)
    if not Path(name).is_file():
        harness = f"lm-eval:{name}"
        known = ("math", "spatial", "a file with the fields prompt, answer", harness)
        raise unknown("task", name, known)
    return Task(name=name, samples=_from_file(name, count), right=_text, max_new_tokens=64)


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


def _text(sample: Sample, completion: str) -> bool:
    return completion.strip() == (sample.answer or "").strip()


# Digits, with commas or without, then decimals and an exponent: 12, 1,200, 12.50, .5, 1.2e1.
_UNSIGNED = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]{1,2}(?![0-9]))?"
)
# A minus after a letter, a digit or a bracket is an operator: 24-12 has no negative number.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w).])[-\u2212])?[$€£]?(?P<late_sign>[-\u2212](?<=[$€£].))?"
    rf"(?:(?P<integer>[0-9]+)\s+(?=[0-9]+/[0-9]))?(?P<top>{_UNSIGNED})"
    rf"(?:\s*/\s*(?P<bottom>{_UNSIGNED}))?"
)
_NAMED = re.compile(r"[Tt]he answer is:?[\s*]*(?=[-\u2212$€£.0-9])")


def _number(sample: Sample, completion: str) -> bool:
    """Whether the number after "The answer is", or the last number, has the right value."""
    named = _NAMED.search(completion)
    number = _NUMBER.match(completion, named.end()) if named else None
    numbers = [number] if number else list(_NUMBER.finditer(completion))
    return bool(numbers) and _value(numbers[-1]) == Fraction(sample.answer or "")


def _value(number: re.Match[str]) -> Fraction | None:
    """The exact value; None for a division by 0, and for more than 100 digits."""
    parts = [(number[name] or "").replace(",", "") for name in ("integer", "top", "bottom")]
    if max(map(len, parts)) > 100:
        return None
    integer, top, bottom = (
        Fraction(part or default) for part, default in zip(parts, "001", strict=True)
    )
    if not bottom:
        return None
    value = integer + top / bottom
    return -value if number["sign"] or number["late_sign"] else value
