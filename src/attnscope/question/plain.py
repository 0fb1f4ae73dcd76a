"""`Plain`: what every part of a question is. Frozen, nothing unknown, nothing converted behind the
user's back.
"""

from pydantic import BaseModel, ConfigDict

__all__ = ["Plain"]


class Plain(BaseModel):
    """Plain data, checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
