"""One item of a prompt source: the prompt, the right answer, and what else is known about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnscope.errors import InputError
from attnscope.tokens.regions import Prompt, join


@dataclass(frozen=True)
class Sample:
    """A prompt with its answer."""

    prompt: Prompt
    answer: str | None = None
    """The expected answer, where the source knows it."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the source knows besides: a level, an action, the fields of a record."""
    images: tuple[Any, ...] = ()
    """The pictures of the prompt, in the order of their marks, as the source has them: paths, bytes
    or base64."""

    def answered(self) -> Prompt:
        """The prompt with its answer written under it, in the region `answer`: to train on."""
        if self.answer is None:
            raise InputError("this sample has no answer; its source gave none", code="no-answer")
        return join([(None, self.prompt), (None, "\n"), ("answer", self.answer)])


def compose(system: str | None, body: Prompt) -> Prompt:
    """The body with a system prompt above it, set off by an empty line."""
    return join([("system", system), (None, "\n\n"), (None, body)]) if system else body
