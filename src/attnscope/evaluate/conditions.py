"""Conditions of an evaluation, in a word each: what is done to the prompt, and to the model.

baseline · filler[:COUNT[:UNIT]][@POSITION] · arm[:NAME=VALUE,…] · knockout:CLASS[@REGION] ·
steer:CLASS[@REGION]:FACTOR; and several at once with a bar between values, `arm:c=0.05|0.25|0.45`
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import torch

from attnscope.errors import InputError, unknown
from attnscope.interventions.arm import arm
from attnscope.interventions.knockout import knockout
from attnscope.interventions.steer import steer
from attnscope.prompts import Filler, insert
from attnscope.prompts.insertion import POSITIONS
from attnscope.tokens import DEFAULT, TokenizedPrompt
from attnscope.tokens.tokenized import Batch

KINDS = ("baseline", "filler", "arm", "knockout", "steer")
_ARM = {"c": float, "p1": float, "share": float, "layer": int, "seed": int}


class Way(Protocol):
    """How something is asked: a condition, or one that is watched."""

    def asked(self, prompt: TokenizedPrompt, tokenizer: Any) -> TokenizedPrompt:
        """The prompt as it is put."""

    def block(
        self, model: Any, tokenizer: Any, batch: Batch, *, among: Any = None
    ) -> AbstractContextManager[None]:
        """What is done to the model meanwhile; `among` bool [batch, tokens] says which tokens are
        the prompt, where an answer stands behind it."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One way to ask."""

    name: str
    """As it was written."""
    kind: str
    filler: Filler | None = None
    position: str = "between"
    """Where the filler goes."""
    options: tuple[tuple[str, Any], ...] = ()
    token_class: str | None = None
    region: str | None = None

    @property
    def settings(self) -> dict[str, str]:
        """What can be varied about it, and how it is set, as far as it was said."""
        if self.filler is not None:
            unit = self.filler.unit or "/"
            return {"length": str(self.filler.count), "unit": unit, "position": self.position}
        named = {("layer" if name == "layers" else name): f"{v:g}" for name, v in self.options}
        where = {"class": self.token_class, "region": self.region}
        return {name: value for name, value in where.items() if value is not None} | named

    def asked(self, prompt: TokenizedPrompt, tokenizer: Any) -> TokenizedPrompt:
        """The prompt as it is put."""
        if self.filler is None:
            return prompt
        return insert(prompt, self.filler, tokenizer, position=self.position).variant

    def block(
        self, model: Any, tokenizer: Any, batch: Batch, *, among: Any = None
    ) -> AbstractContextManager[None]:
        """What is done to the model meanwhile."""
        options = dict(self.options)
        if self.kind == "arm":
            return arm(model, **options)
        if self.token_class is None:
            return nullcontext()
        keys = self._keys(tokenizer, batch)
        if among is not None:
            keys &= torch.from_numpy(among)
        if not bool(keys.any()):
            return nullcontext()  # nobody in this batch has such a token
        if self.kind == "knockout":
            return knockout(model, keys=keys)
        return steer(model, keys=keys, factor=options["factor"])

    def _keys(self, tokenizer: Any, batch: Batch) -> torch.Tensor:
        real = batch.attention_mask.astype(bool)
        ids = DEFAULT.ids(batch.input_ids, tokenizer, real)
        keys = torch.from_numpy(ids == DEFAULT.index(self.token_class or ""))
        if self.region is not None:
            keys = keys & torch.from_numpy(batch.mask(self.region))
        return keys


def spelled_out(text: str) -> list[str]:
    """The conditions that a word with bars stands for, every value with every other."""
    parts = re.split(r"([:,=@])", text)
    choices = [part.split("|") for part in parts]
    if any("" in some for some in choices if len(some) > 1):
        raise InputError(f"{text!r}: there is nothing on one side of a bar")
    return ["".join(some) for some in product(*choices)]


def parse(text: str) -> Condition:
    """A condition from how it is written."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise unknown("condition", kind, KINDS)
    if kind == "baseline":
        if rest:
            raise InputError(f"{text!r}: the baseline takes nothing")
        return Condition(name=text, kind=kind)
    if kind == "filler":
        rest, _, position = rest.partition("@")
        count, _, unit = rest.partition(":")
        if count and not count.isdigit():
            raise InputError(f"{text!r}: a filler is written filler:COUNT:UNIT, as filler:55:/")
        filler = Filler(kind="repeat", count=int(count or 55), unit=unit or None)
        if position and position not in POSITIONS:
            raise unknown(f"position in {text!r}:", position, POSITIONS)
        return Condition(name=text, kind=kind, filler=filler, position=position or "between")
    if kind == "arm":
        return Condition(name=text, kind=kind, options=_arm_options(text, rest))
    where, _, factor = rest.partition(":")
    token_class, _, region = where.partition("@")
    DEFAULT.index(token_class)
    options: tuple[tuple[str, Any], ...] = ()
    if kind == "steer":
        options = (("factor", _value(text, "factor", factor, float)),)
    elif factor:
        raise InputError(f"{text!r}: a knockout is written knockout:CLASS or knockout:CLASS@REGION")
    return Condition(
        name=text, kind=kind, token_class=token_class, region=region or None, options=options
    )


def _arm_options(text: str, rest: str) -> tuple[tuple[str, Any], ...]:
    found: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in _ARM:
            raise unknown("setting of arm", name, _ARM)
        found["layers" if name == "layer" else name] = _value(text, name, value, _ARM[name])
    return tuple(found.items())


def _value(text: str, name: str, value: str, kind: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise InputError(f"{text!r}: {name} is {value!r}, and must be a number") from None
