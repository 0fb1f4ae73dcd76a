"""Where the prompts of an experiment come from, as plain data: a class for each source."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, model_validator

from attnscope.errors import InputError, unknown
from attnscope.prompts.math import LEVELS
from attnscope.prompts.needle import DEPTHS, LENGTHS
from attnscope.prompts.shapes import ABOUT_ONE, TASKS
from attnscope.spec.base import Count, Seed, StrictModel

LARGEST_MAP = 99
"""Rows and columns of a spatial map: its cells are their product."""


class SpatialPrompts(StrictModel):
    """Maps with a shape, from `attnscope.prompts.spatial`."""

    source: Literal["spatial"] = "spatial"
    count: Count = 64
    seed: Seed = 0
    task: Literal["action", "map"] = "action"
    split: Literal["train", "test"] | None = None
    size: Annotated[StrictInt, Field(ge=7, le=LARGEST_MAP)] = 9


class MathPrompts(StrictModel):
    """Word problems, from `attnscope.prompts.math`."""

    source: Literal["math"] = "math"
    count: Count = 64
    seed: Seed = 0
    level: StrictInt | None = None
    """1 to 5; all levels in turn where it is not given."""

    @model_validator(mode="after")
    def _level(self) -> MathPrompts:
        if self.level is not None and self.level not in LEVELS:
            raise unknown("level", self.level, LEVELS)
        return self


class EquationPrompts(MathPrompts):
    """Problems with operators, from `attnscope.prompts.equations`."""

    source: Literal["equations"] = "equations"  # type: ignore[assignment]


class RecordPrompts(StrictModel):
    """Records that become prompts through a template, from `attnscope.prompts.datasets`."""

    count: Count | None = None
    """The first so many records; all of them where it is not given."""
    template: StrictStr = "{question}"
    fields: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    system: StrictStr | None = None
    image: StrictStr | None = "image"
    """The field with the picture of the prompt, or a list of them; each needs one `<image>` in the
    text."""
    mark: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    """Region to field: the first place where the prompt has the field's text as whole words."""


class FilePrompts(RecordPrompts):
    """The records of a file."""

    source: Literal["file"] = "file"
    path: StrictStr
    digest: StrictStr | None = None
    """SHA-256 of the file, filled in by a run; one that is given must be right."""


class InlinePrompts(RecordPrompts):
    """Prompts in the experiment itself: `prompts: [TEXT, TEXT]` is the short form."""

    source: Literal["inline"] = "inline"
    records: Annotated[tuple[StrictStr | dict[StrictStr, Any], ...], Field(min_length=1)]
    """Texts, each the field `question` of its record; or records with any fields."""


class HubPrompts(RecordPrompts):
    """A data set of the Hugging Face hub, or a folder in its form, through `datasets`."""

    source: Literal["hub"] = "hub"
    name: StrictStr
    split: StrictStr
    """`train`, `test`, or a part such as `test[:100]`."""
    config: StrictStr | None = None
    revision: StrictStr | None = None
    """A branch, a tag or a commit; the newest where it is not given."""
    path: StrictStr | None = None
    """The records, in the file that a run keeps: with it the hub is not asked again."""
    digest: StrictStr | None = None
    """SHA-256 of that file, filled in by a run; one that is given must be right."""


class FolderPrompts(RecordPrompts):
    """The pictures of a folder and its subfolders, each with the same question.

    The records have the fields `image`, `file`, `label` (the subfolder) and `question`."""

    source: Literal["pictures"] = "pictures"
    folder: StrictStr
    question: StrictStr = "What is in the picture?"
    template: StrictStr = "<image>\n{question}"
    path: StrictStr | None = None
    """The records, in the file that a run keeps: with it the folder is not read again."""
    digest: StrictStr | None = None
    """SHA-256 of that file, filled in by a run; one that is given must be right."""


class ShapesPrompts(RecordPrompts):
    """Pictures of coloured shapes with a question, from `attnscope.prompts.shapes`.

    The records have the fields `image`, `question`, `answer`, `task`, `seed`, `number`, `shapes`
    (how many), `covered` (the share of the picture in their boxes), `target`, `word` (its name in
    the question) and `box`."""

    source: Literal["shapes"] = "shapes"
    count: Count = 64
    seed: Annotated[StrictInt, Field(ge=0, le=2**31)] = 0
    tasks: Annotated[tuple[StrictStr, ...], Field(min_length=1)] = ABOUT_ONE
    """In turn."""
    system: StrictStr | None = "Answer questions about the picture."
    """As zoo:shapes-vlm was trained."""
    template: StrictStr = "<image>{question}"
    path: StrictStr | None = None
    """The records, in the file that a run keeps: with it they are not made again."""
    digest: StrictStr | None = None
    """SHA-256 of that file, filled in by a run; one that is given must be right."""

    @model_validator(mode="after")
    def _tasks(self) -> ShapesPrompts:
        for task in self.tasks:
            if task not in TASKS:
                raise unknown("task", task, TASKS)
        return self


class ConversationPrompts(StrictModel):
    """Conversations of several turns, from `attnscope.prompts.conversations`."""

    source: Literal["conversations"] = "conversations"
    path: StrictStr | None = None
    """A file with `messages` in every record; made up where there is none."""
    count: Count | None = None
    """The first so many; all of a file, or 16, where it is not given."""
    field: StrictStr = "messages"
    turns: Annotated[StrictInt, Field(ge=1, le=1000)] = 8
    """Of made-up conversations: rounds of a user and an assistant turn."""
    seed: Seed = 0
    digest: StrictStr | None = None
    """As of any file."""


class NeedlePrompts(StrictModel):
    """A needle in a haystack, from `attnscope.prompts.needle`."""

    source: Literal["needle"] = "needle"
    count: Count | None = None
    """Prompt n has the depth and length of n, in turn; one for each of them by default."""
    depths: tuple[Annotated[float, Field(ge=0, le=1)], ...] = DEPTHS
    lengths: tuple[Count, ...] = LENGTHS
    """In words."""
    seed: Seed = 0
    path: StrictStr | None = None
    """A text file as the haystack; sentences that mean nothing where there is none."""
    needle: StrictStr | None = None
    """With its `question`, and the `answer` in it; made up where there is none."""
    question: StrictStr | None = None
    answer: StrictStr | None = None
    stem: StrictBool = False
    """End with the words of the needle before the answer, for models without instruction tuning."""
    digest: StrictStr | None = None
    """As of any file."""

    @model_validator(mode="after")
    def _check_needle(self) -> NeedlePrompts:
        if not self.depths or not self.lengths:
            raise InputError(
                "depths or lengths is empty; give at least one of each",
                code="empty-list",
                key="depths" if not self.depths else "lengths",
            )
        if (self.needle is None) != (self.question is None):
            raise InputError(
                "a needle needs its question, and a question its needle: give both",
                code="incomplete-needle",
            )
        if self.answer is not None and self.answer not in (self.needle or ""):
            raise InputError(
                f"the answer {self.answer!r} is not in the needle {self.needle!r}",
                code="answer-not-in-needle",
                answer=self.answer,
            )
        return self


class DocumentPrompts(StrictModel):
    """Documents in order and a question, from `attnscope.prompts.documents`."""

    source: Literal["documents"] = "documents"
    count: Count = 16
    seed: Seed = 0
    documents: Annotated[StrictInt, Field(ge=2, le=1000)] = 10
    words: Annotated[StrictInt, Field(ge=1, le=100_000)] = 40
    """Of each document, at least."""


class TokenPrompts(StrictModel):
    """Tokens of the vocabulary, drawn at random, so many times over; never in a chat template.

    The regions are `repeat:1`, `repeat:2` … ."""

    source: Literal["tokens"] = "tokens"
    count: Count = 16
    seed: Seed = 0
    length: Annotated[StrictInt, Field(ge=1, le=100_000)] = 64
    repeats: Annotated[StrictInt, Field(ge=1, le=1000)] = 1


class SpeechPrompts(StrictModel):
    """Spoken sentences for a speech model, from `attnscope.prompts.speech`: the decoder reads the
    transcript, the encoder the sound."""

    source: Literal["speech"] = "speech"
    count: Count = 12
    seed: Seed = 0
    """Seed n takes the sentences after those of seed n − 1."""


class HarnessPrompts(StrictModel):
    """The documents of a task of lm-evaluation-harness; `attnscope evaluate` measures them."""

    source: Literal["lm-eval"] = "lm-eval"
    task: StrictStr
    """A name, or the YAML file of a task."""
    count: Count = 100
    """The first so many documents, or as many as there are."""


Prompts = Annotated[
    SpatialPrompts
    | MathPrompts
    | EquationPrompts
    | FilePrompts
    | InlinePrompts
    | HubPrompts
    | FolderPrompts
    | ShapesPrompts
    | ConversationPrompts
    | NeedlePrompts
    | DocumentPrompts
    | TokenPrompts
    | SpeechPrompts
    | HarnessPrompts,
    Field(discriminator="source"),
]

SOURCES: dict[str, type[StrictModel]] = {
    "spatial": SpatialPrompts,
    "math": MathPrompts,
    "equations": EquationPrompts,
    "file": FilePrompts,
    "inline": InlinePrompts,
    "hub": HubPrompts,
    "pictures": FolderPrompts,
    "shapes": ShapesPrompts,
    "conversations": ConversationPrompts,
    "needle": NeedlePrompts,
    "documents": DocumentPrompts,
    "tokens": TokenPrompts,
    "speech": SpeechPrompts,
    "lm-eval": HarnessPrompts,
}
"""By the word under `source`."""
