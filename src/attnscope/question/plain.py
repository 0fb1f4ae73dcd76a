"""`Plain`: what every part of a question is. Frozen, nothing unknown, nothing converted behind the
user's back.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictInt

MOST = 1_000_000
"""Prompts of an experiment, and tokens of a filler: more is a slip of the finger."""
Count = Annotated[StrictInt, Field(ge=1, le=MOST)]
Seed = Annotated[StrictInt, Field(ge=-(2**62), le=2**62)]


class Plain(BaseModel):
    """Plain data, checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
