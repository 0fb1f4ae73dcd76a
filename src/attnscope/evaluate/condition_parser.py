"""Conditions of an evaluation, in a word each: what is done to the prompt, and to the model.

baseline · filler[:COUNT[:UNIT]][@POSITION] · arm[:NAME=VALUE,…] · knockout:CLASS[@REGION] ·
steer:CLASS[@REGION]:FACTOR; and several at once with a bar between values, `arm:c=0.05|0.25|0.45`

What a word stands for is a condition of an experiment (`question/conditions.py`).
"""

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from attnscope.errors import InputError, unknown
from attnscope.experiment.intervene import intervening
from attnscope.prompts import insert
from attnscope.prompts.insertion import POSITIONS
from attnscope.spec.base import checked
from attnscope.spec.conditions import Condition, KnockoutSpec
from attnscope.tokens import DEFAULT, TokenizedPrompt
from attnscope.tokens.tokenized import PaddedBatch

KINDS = ("baseline", "filler", "arm", "knockout", "steer")
_ARM = {"c": float, "p1": float, "share": float, "layer": int, "seed": int}


class ConditionProtocol(Protocol):
    """How something is asked: a condition, or one that is watched."""

    @property
    def name(self) -> str:
        """As the condition was written."""

    def asked(self, prompt: TokenizedPrompt, tokenizer: Any) -> TokenizedPrompt:
        """The prompt as it is put."""

    def block(
        self, model: Any, tokenizer: Any, batch: PaddedBatch, *, among: Any = None
    ) -> AbstractContextManager[None]:
        """What is done to the model meanwhile; `among` bool [batch, tokens] says which tokens are
        the prompt, where an answer stands behind it."""


@dataclass(frozen=True, kw_only=True)
class ParsedCondition:
    """A condition, and the word for it."""

    name: str
    """As it was written."""
    kind: str
    """How it begins: one of `KINDS`."""
    what: Condition

    @property
    def cut(self) -> KnockoutSpec | None:
        """Whose attention is taken, or scaled."""
        return self.what.knockout or self.what.steer

    @property
    def settings(self) -> dict[str, str]:
        """What can be varied about it, and how it is set, as far as it was said."""
        filler, arm, cut = self.what.insert, self.what.arm, self.cut
        if filler is not None:
            unit, position = filler.filler(0).repeated, str(self.what.position)
            return {"length": str(filler.count), "unit": unit, "position": position}
        said: dict[str, Any] = {}
        if arm is not None:
            said = arm.model_dump(exclude_unset=True)
            said = {("layer" if k == "layers" else k): v for k, v in said.items()}
        elif cut is not None:
            said = {"class": cut.tokens} | cut.model_dump(include={"region", "factor"})
        told = {k: v[0] if isinstance(v, tuple) else v for k, v in said.items() if v is not None}
        return {k: v if isinstance(v, str) else f"{v:g}" for k, v in told.items()}

    def asked(self, prompt: TokenizedPrompt, tokenizer: Any) -> TokenizedPrompt:
        """The prompt as it is put."""
        if self.what.insert is None:
            return prompt
        filler = self.what.insert.filler(0)
        return insert(prompt, filler, tokenizer, position=self.what.position).variant

    def block(
        self, model: Any, tokenizer: Any, batch: PaddedBatch, *, among: Any = None
    ) -> AbstractContextManager[None]:
        """What is done to the model meanwhile."""
        if self.cut is not None and self.cut.region is not None:
            batch.mask(self.cut.region)  # one that a prompt has not is a misspelling
        return intervening(self.what, model, tokenizer, batch, [DEFAULT], among)


def spelled_out(text: str) -> list[str]:
    """The conditions that a word with bars stands for, every value with every other."""
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
    """A condition from how it is written."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise unknown("condition", kind, KINDS)
    said: dict[str, Any] = {}
    if kind == "baseline" and rest:
        raise InputError(
            f"{text!r}: the baseline has no settings; write 'baseline'",
            code="bad-condition",
            condition=text,
        )
    if kind == "filler":
        said = _filler(text, rest)
    elif kind == "arm":
        said = {"arm": _arm(text, rest)}
    elif kind in ("knockout", "steer"):
        said = {kind: _cut(text, kind, rest)}
    return ParsedCondition(name=text, kind=kind, what=checked(Condition, said, repr(text)))


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
    put = {"kind": "repeat", "count": int(count or 55), "unit": unit or None}
    return {"insert": put, "position": position or "between"}


def _arm(text: str, rest: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in _ARM:
            raise unknown("setting of arm", name, _ARM)
        found[name] = _value(text, name, value, _ARM[name])
    if "layer" in found:
        found["layers"] = (found.pop("layer"),)
    return found


def _cut(text: str, kind: str, rest: str) -> dict[str, Any]:
    where, _, factor = rest.partition(":")
    token_class, _, region = where.partition("@")
    DEFAULT.index(token_class)
    found: dict[str, Any] = {"tokens": token_class, "region": region or None}
    if kind == "steer":
        return found | {"factor": _value(text, "factor", factor, float)}
    if factor:
        raise InputError(
            f"{text!r}: write a knockout as knockout:CLASS or knockout:CLASS@REGION",
            code="bad-condition",
            condition=text,
        )
    return found


def _value(text: str, name: str, value: str, kind: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise InputError(
            f"{text!r}: {name} is {value!r}; it must be a number",
            code="not-a-number",
            condition=text,
            name=name,
            value=value,
        ) from None
