"""Where the prompts of an experiment come from, as plain data: a class for each source.

This module must not know how prompts are built: that is `attnscope.prompts`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictInt, StrictStr, model_validator

from attnscope.errors import unknown
from attnscope.prompts.math import LEVELS
from attnscope.question.plain import Count, Plain, Seed

LARGEST_MAP = 99
"""Rows and columns of a spatial map: its cells are their product."""


class SpatialPrompts(Plain):
    """Maps with a shape, from `attnscope.prompts.spatial`."""

    source: Literal["spatial"] = "spatial"
    count: Count = 64
    seed: Seed = 0
    task: Literal["action", "map"] = "action"
    split: Literal["train", "test"] | None = None
    size: Annotated[StrictInt, Field(ge=7, le=LARGEST_MAP)] = 9


class MathPrompts(Plain):
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


class FilePrompts(Plain):
    """The records of a file, from `attnscope.prompts.datasets`."""

    source: Literal["file"] = "file"
    path: StrictStr
    count: Count | None = None
    """The first so many records; all of them where it is not given."""
    template: StrictStr = "{question}"
    fields: dict[StrictStr, StrictStr] = Field(default_factory=dict)
    system: StrictStr | None = None
    digest: StrictStr | None = None
    """SHA-256 of the file, filled in by a run; one that is given must be right."""


Prompts = Annotated[SpatialPrompts | MathPrompts | FilePrompts, Field(discriminator="source")]

SOURCES: dict[str, type[Plain]] = {
    "spatial": SpatialPrompts,
    "math": MathPrompts,
    "file": FilePrompts,
}
"""By the word under `source`."""
