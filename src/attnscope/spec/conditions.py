"""Conditions: how a prompt is changed, or what is done to the model that reads it. One of them,
the base, leaves both as they are.

`Experiment.base` names the base condition.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, StrictStr, model_validator

from attnscope.errors import InputError, unknown
from attnscope.prompts.filler import FILLERS, Filler
from attnscope.prompts.insertion import POSITIONS
from attnscope.spec.base import MOST, Seed, StrictModel

WITHOUT_FILE = ("blank", "next")
"""Changes of a picture that need no file."""
_POSITIONS = (
    f"known: {', '.join(POSITIONS)}, before:REGION, after:REGION, or the number of a character"
)


def _position(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InputError(
            f"unknown position {value!r}; {_POSITIONS}", code="unknown-position", value=value
        )
    if isinstance(value, int):
        if value < 0:
            raise InputError(
                f"position {value} is before the first character; {_POSITIONS}",
                code="unknown-position",
                value=value,
            )
        return value
    side, _, region = value.partition(":")
    if value not in POSITIONS and not (side in ("before", "after") and region):
        raise InputError(
            f"unknown position {value!r}; {_POSITIONS}", code="unknown-position", value=value
        )
    return value


class Insert(StrictModel):
    """What is inserted: the fields of `attnscope.prompts.Filler`."""

    kind: StrictStr = "repeat"
    unit: StrictStr | Annotated[tuple[StrictStr, ...], Field(min_length=1)] | None = None
    """Several units are used in turn: prompt n gets number n, and after the last the first."""
    count: Annotated[StrictInt, Field(ge=0, le=MOST)] = 55
    """0 inserts nothing: a variant of its own that says what the base says."""
    seed: Seed = 0
    """Prompt n gets the filler of seed + n, so that many prompts have many sentences."""

    @model_validator(mode="after")
    def _possible(self) -> Insert:
        if self.kind not in FILLERS:
            raise unknown("kind of filler", self.kind, FILLERS)
        for number in range(len(self.unit) if isinstance(self.unit, tuple) else 1):
            self.filler(number)
        return self

    def filler(self, prompt: int) -> Filler:
        """What goes into this prompt."""
        unit = self.unit[prompt % len(self.unit)] if isinstance(self.unit, tuple) else self.unit
        return Filler(kind=self.kind, count=self.count, unit=unit, seed=self.seed + prompt)


class Replace(StrictModel):
    """Other words: in place of a region, or wherever the prompt says `old`."""

    region: StrictStr | None = None
    old: Annotated[StrictStr, Field(min_length=1)] | None = None
    new: StrictStr

    @model_validator(mode="after")
    def _one(self) -> Replace:
        if (self.region is None) == (self.old is None):
            raise InputError(
                "give one of region and old: 'new' replaces that region or that text",
                code="bad-replacement",
            )
        return self


class KnockoutSpec(StrictModel):
    """Keys that attention is taken from: the tokens of a class, of a region, or of both."""

    tokens: StrictStr | None = None
    """A class of one of the experiment's class sets."""
    region: StrictStr | None = None
    layers: tuple[Annotated[StrictInt, Field(ge=0)], ...] | None = None
    heads: tuple[Annotated[StrictInt, Field(ge=0)], ...] | None = None

    @model_validator(mode="after")
    def _some(self) -> KnockoutSpec:
        if self.tokens is None and self.region is None:
            raise InputError(
                "give the keys to change: tokens (a class), region, or both", code="no-keys-chosen"
            )
        return self


class SteerSpec(KnockoutSpec):
    """Keys whose attention is scaled, before the softmax divides."""

    factor: Annotated[float, Field(gt=0, le=1e6)]


class ArmSpec(StrictModel):
    """Activations moved away from zero (ARM); what is left out is the family's own."""

    c: Annotated[float, Field(gt=0)] | None = None
    p1: Annotated[float, Field(gt=0, le=100)] | None = None
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    layers: tuple[Annotated[StrictInt, Field(ge=0)], ...] = (0,)
    seed: Seed = 0


class Condition(StrictModel):
    """How a prompt is changed: by an insertion, or by any of the rest. And what is done to the
    model meanwhile, with a changed prompt or alone."""

    insert: Insert | None = None
    position: Annotated[StrictInt | StrictStr, BeforeValidator(_position)] = "between"
    by: Literal["text", "ids"] = "text"
    replace: Replace | None = None
    system: StrictStr | Literal[False] | None = None
    """Another system prompt; false leaves it out."""
    chat: StrictBool | None = None
    """In the chat template or not, where that is other than in the base."""
    template: StrictStr | None = None
    """Another chat template, in Jinja."""
    bos: Literal[False] | None = None
    """False leaves out the begin-of-sequence token."""
    image: Annotated[StrictStr, Field(min_length=1)] | None = None
    """Other pictures: `blank` (the same size, in the mean colour of the picture), `next` (those of
    the next prompt), or the path of a file, which replaces every picture."""
    random: Seed | None = None
    """As many tokens, drawn at random from the vocabulary, prompt n with this seed + n; a
    begin-of-sequence token stays. None of them has an aligned position."""
    knockout: KnockoutSpec | None = None
    steer: SteerSpec | None = None
    arm: ArmSpec | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Condition:
        if self.insert is not None and self.rewrites:
            raise InputError(
                "a condition cannot both insert text and change existing text "
                f"({self.rewrites[0]}): tokens could not be aligned with the base. Use two "
                "conditions",
                code="insert-and-rewrite",
                key=self.rewrites[0],
            )
        if self.template is not None and self.chat is False:
            raise InputError(
                "a template needs chat: true; leave out template or chat: false",
                code="template-without-chat",
            )
        return self

    @property
    def rewrites(self) -> list[str]:
        """What is changed, apart from insertions."""
        names = ("replace", "system", "chat", "template", "bos", "image", "random")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def intervenes(self) -> list[str]:
        """What is done to the model."""
        return [name for name in ("knockout", "steer", "arm") if getattr(self, name) is not None]

    @property
    def kind(self) -> str | None:
        """What is inserted, or the first of what is changed; None where the prompt is as it is."""
        if self.insert is not None:
            return self.insert.kind
        done = [*self.rewrites, *self.intervenes]
        return done[0] if done else None


def base_of(conditions: dict[str, Condition], name: str | None) -> str:
    """The condition that the others are compared with: the one that changes nothing."""
    unchanged = [one for one, condition in conditions.items() if condition.kind is None]
    if name is not None and name not in conditions:
        raise unknown("base", name, conditions)
    if len(unchanged) != 1:
        raise InputError(
            f"{len(unchanged)} conditions change nothing ({', '.join(unchanged) or 'none'}); "
            "exactly one must, as the base: 'base: {}'",
            code="not-one-base",
            conditions=unchanged,
        )
    if name is not None and name != unchanged[0]:
        raise InputError(
            f"the base is {name!r}, which changes something; only {unchanged[0]!r} changes nothing",
            code="base-changes-something",
            value=name,
            known=unchanged,
        )
    return unchanged[0]
