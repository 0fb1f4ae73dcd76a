"""Tasks: problems with answers that can be checked exactly."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import regex

from attnscope.errors import InputError, unknown
from attnscope.experiment.prompt_list import samples_of
from attnscope.prompts import read
from attnscope.prompts.number_answers import same_number
from attnscope.spec.experiment import Experiment
from attnscope.tokens.token_class import SECONDS_PER_TOKEN
from attnscope.tokens.whole_words import WholeWords

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
    match: str = "exact"
    """The rule by which completions of a file are judged: one of `MATCHES`, or `choices`."""

    @property
    def metric(self) -> str:
        """The name of the score in the table `completions`."""
        return "right" if self.match == "exact" else f"right ({self.match})"


def find_task(
    name: str, count: int, *, seed: int = SEED, level: int | None = None, match: str = "exact"
) -> Task:
    """A bundled task by its name, or the problems of a file with the fields prompt and answer.

    `math` takes the number after "The answer is", or the last number of the completion, and
    compares its value: 12.00, $12 and 24/2 are 12. `spatial` compares the complete text, without
    the whitespace around it. A file is judged by `match`; `choices` needs the field `choices`.
    """
    if match not in (*MATCHES, CHOICES):
        raise unknown("match", match, (*MATCHES, CHOICES))
    if match != "exact" and name in ("math", "spatial"):
        raise InputError(
            f"--match {match}: the task {name} has its own rule; --match is for files",
            code="unsupported-argument",
            match=match,
            task=name,
        )
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
    return Task(
        name=Path(name).stem,
        prompts=prompts,
        right=MATCHES.get(match, same_text),
        max_new_tokens=64,
        match=match,
    )


def answers_of(experiment: Experiment, match: str = "exact") -> list[str]:
    """The right answer of every prompt; for `regex`, each must be a pattern."""
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
        if match == "regex":
            _check_pattern(n, answers[-1])
    return answers


def choices_of(experiment: Experiment) -> list[list[str]]:
    """The choices of every prompt, from the field `choices` of its record."""
    choices = []
    for n, sample in enumerate(samples_of(experiment)):
        texts = sample.metadata.get("choices")
        if isinstance(texts, str):  # a list in a CSV file
            texts = [part.strip() for part in texts.split("|")]
        listed = texts if isinstance(texts, list) else []
        good = all(isinstance(text, str) and text.strip() for text in listed)
        if not good or len({*map(str, listed)}) < 2 or sample.answer not in listed:
            raise InputError(
                f"problem {n}: choices is {texts!r:.80}; give a list of two or more different "
                f"texts that has the answer {sample.answer!r}",
                code="bad-choices",
                problem=n,
                value=texts,
            )
        choices.append(listed)
    return choices


def _check_pattern(problem: int, answer: str) -> None:
    try:
        regex.compile(answer)
    except regex.error as error:
        raise InputError(
            f"problem {problem}: the answer {answer!r} is not a pattern: {error}",
            code="bad-pattern",
            pattern=answer,
            problem=problem,
        ) from error


def same_text(answer: str, completion: str) -> bool:
    """Whether the completion is the answer, without the whitespace around both."""
    return completion.strip() == answer.strip()


def _starts_with(answer: str, completion: str) -> bool:
    """Whether the completion begins with the answer, as whole words and in any case."""
    spans = WholeWords([answer.strip()], ignore_case=True).spans(completion.lstrip())
    return bool(spans) and spans[0][0] == 0


def _contains(answer: str, completion: str) -> bool:
    """Whether the completion has the answer, as whole words and in any case."""
    return bool(WholeWords([answer.strip()], ignore_case=True).spans(completion))


def _matches(answer: str, completion: str) -> bool:
    """Whether the pattern of the answer matches anywhere in the completion."""
    try:
        return regex.search(answer, completion, timeout=SECONDS_PER_TOKEN) is not None
    except TimeoutError as error:
        raise InputError(
            f"the pattern {answer!r} takes too long; write it without a repeat inside a repeat",
            code="pattern-too-slow",
            pattern=answer,
        ) from error


MATCHES: dict[str, Callable[[str, str], bool]] = {
    "exact": same_text,
    "starts-with": _starts_with,
    "contains": _contains,
    "regex": _matches,
}
CHOICES = "choices"
