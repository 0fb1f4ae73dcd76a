"""How a model generates completions in an experiment: greedily, or sampled."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, StrictInt, model_validator

from attnscope.errors import InputError
from attnscope.spec.base import Seed, StrictModel

GENERATED = "generated"
"""The region of what the model wrote; the queries that are its tokens."""
LONGEST_ANSWER = 100_000


class Generate(StrictModel):
    """How every prompt is answered."""

    max_new_tokens: Annotated[StrictInt, Field(ge=1, le=LONGEST_ANSWER)] = 32
    """The answer is over here, or where the model ends it."""
    sample: StrictBool = False
    """Draw every token; otherwise the likeliest is taken."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Seed | None = None
    """Prompt n is answered with seed + n, under every condition. Without one, a sampled answer
    cannot be had again, and the run says so."""

    @model_validator(mode="after")
    def _of_sampling(self) -> Generate:
        sampling_keys = [name for name in ("temperature", "top_p", "seed") if self._differs(name)]
        if sampling_keys and not self.sample:
            raise InputError(
                f"generate.{sampling_keys[0]} needs sampling; add 'sample: true'",
                code="needs-sampling",
                key=f"generate.{sampling_keys[0]}",
            )
        return self

    def _differs(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def repeatable(self) -> bool:
        """Whether the same answers come again."""
        return not self.sample or self.seed is not None
