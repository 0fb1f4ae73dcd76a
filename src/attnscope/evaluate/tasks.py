"""Tasks: problems with answers that can be checked exactly."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

from attnscope.errors import InputError, unknown
from attnscope.experiment.prompt_list import samples_of
from attnscope.prompts import read
from attnscope.spec.experiment import Experiment

# The training sets of the bundled models use other seeds.
SEED = 20_260


@dataclass(frozen=True, kw_only=True)
class Task:
    """The prompts of an experiment, and a function that judges completions."""

    name: str
    prompts: dict[str, Any]
    """The key `prompts` of an experiment."""
    right: Callable[[str, str], bool]
    """Whether a completion (second) has the answer (first)."""
    max_new_tokens: int
    """Maximum number of tokens of a completion."""


def find_task(name: str, count: int, *, seed: int = SEED, level: int | None = None) -> Task:
    """A bundled task by its name, or the problems of a file with the fields prompt and answer.

    `math` takes the number after "The answer is", or the last number of the completion, and
    compares its value: 12.00, $12 and 24/2 are 12. `spatial` and files compare the complete text,
    without the whitespace around it.
    """
    if level is not None and name != "math":
        raise InputError(
            f"level={level}: only the task math has levels, not {name}; leave it out",
            code="unsupported-argument",
            level=level,
            task=name,
        )
    prompts: dict[str, Any] = {"source": name, "count": count, "seed": seed}
    if name == "math":
        prompts["level"] = level
        return Task(name=name, prompts=prompts, right=same_number, max_new_tokens=64)
    if name == "spatial":
        prompts["split"] = "test"
        return Task(name=name, prompts=prompts, right=same_text, max_new_tokens=12)
    if not Path(name).is_file():
        harness = f"lm-eval:{name}"
        known = ("math", "spatial", "a file with the fields prompt, answer", harness)
        raise unknown("task", name, known)
    layout: dict[str, Any] = {"template": "{question}", "fields": {"question": "prompt"}}
    available = sum(1 for _ in islice(read(name, **layout), count))
    prompts = {"source": "file", "path": name, "count": available or None, **layout}
    return Task(name=Path(name).stem, prompts=prompts, right=same_text, max_new_tokens=64)


def answers_of(experiment: Experiment) -> list[str]:
    """The right answer of every prompt."""
    answers = []
    for n, sample in enumerate(samples_of(experiment)):
        answer = sample.answer if sample.answer is not None else sample.metadata.get("answer")
        if answer is None:
            raise InputError(
                f"problem {n} has no field 'answer'; add the right answer to its record",
                code="missing-field",
                field="answer",
                problem=n,
            )
        answers.append(str(answer))
    return answers


def same_text(answer: str, completion: str) -> bool:
    """Whether the completion is the answer, without the whitespace around both."""
    return completion.strip() == answer.strip()


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


def same_number(answer: str, completion: str) -> bool:
    """Whether the number after "The answer is", or the last number, has the right value."""
    named = _NAMED.search(completion)
    number = _NUMBER.match(completion, named.end()) if named else None
    numbers = [number] if number else list(_NUMBER.finditer(completion))
    return bool(numbers) and _value(numbers[-1]) == Fraction(answer)


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
