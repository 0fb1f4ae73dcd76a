"""Conditions of an evaluation, in a word each: what is done to the prompt, and to the model.

baseline · filler[:COUNT[:UNIT]] · arm[:NAME=VALUE,…] · knockout:CLASS[@REGION] ·
steer:CLASS[@REGION]:FACTOR
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from attnscope.errors import InputError, unknown
from attnscope.interventions.arm import arm
from attnscope.interventions.knockout import knockout
from attnscope.interventions.steer import steer
from attnscope.prompts import Filler, insert
from attnscope.tokens import DEFAULT, TokenizedPrompt
from attnscope.tokens.tokenized import Batch

KINDS = ("baseline", "filler", "arm", "knockout", "steer")
_ARM = {"c": float, "p1": float, "share": float, "layer": int, "seed": int}


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One way to ask."""

    name: str
    """As it was written."""
    kind: str
    filler: Filler | None = None
    options: tuple[tuple[str, Any], ...] = ()
    token_class: str | None = None
    region: str | None = None

    def asked(self, prompt: TokenizedPrompt, tokenizer: Any) -> TokenizedPrompt:
        """The prompt as it is put."""
        if self.filler is None:
            return prompt
        return insert(prompt, self.filler, tokenizer, position="between").variant

    def block(self, model: Any, tokenizer: Any, batch: Batch) -> AbstractContextManager[None]:
        """What is done to the model meanwhile."""
        options = dict(self.options)
        if self.kind == "arm":
            return arm(model, **options)
        if self.token_class is None:
            return nullcontext()
        keys = self._keys(tokenizer, batch)
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
        count, _, unit = rest.partition(":")
        if count and not count.isdigit():
            raise InputError(f"{text!r}: a filler is written filler:COUNT:UNIT, as filler:55:/")
        filler = Filler(kind="repeat", count=int(count or 55), unit=unit or None)
        return Condition(name=text, kind=kind, filler=filler)
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
