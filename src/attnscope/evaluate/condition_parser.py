"""Parses the conditions of an evaluation, each written as one word.

baseline · filler[:COUNT[:UNIT]][@POSITION] · arm[:NAME=VALUE,…] · knockout:CLASS[@REGION] ·
steer:CLASS[@REGION]:FACTOR; a bar between values makes several: `arm:c=0.05|0.25|0.45`

The parsed condition is a condition of an experiment (`spec/conditions.py`).
"""

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from attnscope.errors import InputError, unknown
from attnscope.experiment.intervene import intervene
from attnscope.prompts import insert
from attnscope.prompts.insertion import POSITIONS
from attnscope.spec.base import validate
from attnscope.spec.conditions import Condition, KnockoutSpec
from attnscope.tokens import DEFAULT, TokenizedPrompt
from attnscope.tokens.tokenized import PaddedBatch

CONDITION_TYPES = ("baseline", "filler", "arm", "knockout", "steer")
_ARM = {"c": float, "p1": float, "share": float, "layer": int, "seed": int}


class ConditionProtocol(Protocol):
    """A change of the prompt and of the model; `ParsedCondition`, or one that is also watched."""

    @property
    def name(self) -> str:
        """The condition as the user wrote it."""

    def change_prompt(self, prompt: TokenizedPrompt, tokenizer: Any) -> TokenizedPrompt:
        """The prompt under this condition."""

    def intervention(
        self, model: Any, tokenizer: Any, batch: PaddedBatch, *, among: Any = None
    ) -> AbstractContextManager[None]:
        """The change of the model, as a `with` block.

        `among`, bool [batch, tokens], marks the prompt where an answer follows it in the text.
        """


@dataclass(frozen=True, kw_only=True)
class ParsedCondition:
    """A condition of an experiment, with the word that the user wrote for it."""

    name: str
    """The condition as the user wrote it."""
    kind: str
    """One of `CONDITION_TYPES`."""
    condition: Condition

    @property
    def attention_change(self) -> KnockoutSpec | None:
        """The knockout or the steering of this condition."""
        return self.condition.knockout or self.condition.steer

    @property
    def settings(self) -> dict[str, str]:
        """The settings that a sweep can vary, with their values as text."""
        filler, arm, change = self.condition.insert, self.condition.arm, self.attention_change
        if filler is not None:
            unit, position = filler.filler(0).repeated, str(self.condition.position)
            return {"length": str(filler.count), "unit": unit, "position": position}
        values: dict[str, Any] = {}
        if arm is not None:
            values = arm.model_dump(exclude_unset=True)
            values = {("layer" if k == "layers" else k): v for k, v in values.items()}
        elif change is not None:
            values = {"class": change.tokens} | change.model_dump(include={"region", "factor"})
        values = {
            k: v[0] if isinstance(v, tuple) else v for k, v in values.items() if v is not None
        }
        return {k: v if isinstance(v, str) else f"{v:g}" for k, v in values.items()}

    def change_prompt(self, prompt: TokenizedPrompt, tokenizer: Any) -> TokenizedPrompt:
        """The prompt under this condition."""
        if self.condition.insert is None:
            return prompt
        filler = self.condition.insert.filler(0)
        return insert(prompt, filler, tokenizer, position=self.condition.position).variant

    def intervention(
        self, model: Any, tokenizer: Any, batch: PaddedBatch, *, among: Any = None
    ) -> AbstractContextManager[None]:
        """The change of the model, as a `with` block; `among` marks the prompt."""
        change = self.attention_change
        if change is not None and change.region is not None:
            batch.mask(change.region)  # raises if a prompt does not have the region
        return intervene(self.condition, model, tokenizer, batch, [DEFAULT], among)


def expand(text: str) -> list[str]:
    """The conditions that a word with bars stands for: every combination of its values."""
    parts = re.split(r"([:,=@])", text)
    choices = [part.split("|") for part in parts]
    if any("" in some for some in choices if len(some) > 1):
        raise InputError(
            f"{text!r}: every bar | needs a value on both sides, as in arm:c=0.05|0.25",
            code="bad-condition",
            condition=text,
        )
    return ["".join(some) for some in product(*choices)]


def parse(text: str) -> ParsedCondition:
    """Parse one condition."""
    kind, _, rest = text.partition(":")
    if kind not in CONDITION_TYPES:
        raise unknown("condition", kind, CONDITION_TYPES)
    fields: dict[str, Any] = {}
    if kind == "baseline" and rest:
        raise InputError(
            f"{text!r}: the baseline has no settings; write 'baseline'",
            code="bad-condition",
            condition=text,
        )
    if kind == "filler":
        fields = _filler(text, rest)
    elif kind == "arm":
        fields = {"arm": _arm(text, rest)}
    elif kind in ("knockout", "steer"):
        fields = {kind: _attention_change(text, kind, rest)}
    condition = validate(Condition, fields, repr(text))
    return ParsedCondition(name=text, kind=kind, condition=condition)


def _filler(text: str, rest: str) -> dict[str, Any]:
    rest, _, position = rest.partition("@")
    count, _, unit = rest.partition(":")
    if count and not count.isdigit():
        raise InputError(
            f"{text!r}: write a filler as filler:COUNT:UNIT, for example filler:55:/",
            code="bad-condition",
            condition=text,
        )
    if position and position not in POSITIONS:
        raise unknown("position", position, POSITIONS)
    filler = {"kind": "repeat", "count": int(count or 55), "unit": unit or None}
    return {"insert": filler, "position": position or "between"}


def _arm(text: str, rest: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in _ARM:
            raise unknown("setting of arm", name, _ARM)
        fields[name] = _number(text, name, value, _ARM[name])
    if "layer" in fields:
        fields["layers"] = (fields.pop("layer"),)
    return fields


def _attention_change(text: str, kind: str, rest: str) -> dict[str, Any]:
    where, _, factor = rest.partition(":")
    token_class, _, region = where.partition("@")
    DEFAULT.index(token_class)
    fields: dict[str, Any] = {"tokens": token_class, "region": region or None}
    if kind == "steer":
        return fields | {"factor": _number(text, "factor", factor, float)}
    if factor:
        raise InputError(
            f"{text!r}: write a knockout as knockout:CLASS or knockout:CLASS@REGION",
            code="bad-condition",
            condition=text,
        )
    return fields


def _number(text: str, name: str, value: str, number: Any) -> Any:
    try:
        return number(value)
    except ValueError:
        raise InputError(
            f"{text!r}: {name} is {value!r}; it must be a number",
            code="not-a-number",
            condition=text,
            name=name,
            value=value,
        ) from None
