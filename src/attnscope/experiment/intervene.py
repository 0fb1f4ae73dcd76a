"""What a condition does to the model while it reads: the interventions, on a batch of prompts."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from attnscope.errors import InputError
from attnscope.interventions.arm import arm
from attnscope.interventions.knockout import knockout
from attnscope.interventions.steer import steer
from attnscope.spec.conditions import Condition, KnockoutSpec
from attnscope.tokens import ClassSet
from attnscope.tokens.tokenized import Mask, PaddedBatch

TEXT = 40
"""Characters of a prompt that an error shows."""


@contextmanager
def intervene(
    condition: Condition,
    model: Any,
    tokenizer: Any,
    batch: PaddedBatch,
    classes: Iterable[ClassSet],
    among: Mask | None = None,
) -> Iterator[None]:
    """Apply the interventions of a condition inside the `with` block.

    A class is looked up in the first class set that has it; `among` bool [B, N] limits the keys.
    """
    with ExitStack() as undo:
        for intervention in (condition.knockout, condition.steer):
            if intervention is None:
                continue
            keys = _keys(intervention, tokenizer, batch, classes)
            if among is not None:
                keys &= among
            if not keys.any():
                continue  # no prompt of this batch has such a token
            where: dict[str, Any] = {"layers": intervention.layers, "heads": intervention.heads}
            where["keys"] = torch.from_numpy(keys)
            if intervention is condition.steer:
                undo.enter_context(steer(model, factor=condition.steer.factor, **where))
            else:
                undo.enter_context(knockout(model, **where))
        if condition.arm is not None:
            undo.enter_context(arm(model, **condition.arm.model_dump()))
        try:
            yield
        except InputError as error:
            if error.code != "no-visible-key":
                raise
            raise _no_visible_key(batch, error) from error


def _no_visible_key(batch: PaddedBatch, error: InputError) -> InputError:
    """The error of a knockout that leaves a token no key, with what can be changed in a file."""
    sequence, position = (int(str(error.values[name])) for name in ("sequence", "position"))
    text = " ".join(batch.rows[sequence].prompt.text.split())
    shown = text if len(text) <= TEXT else f"{text[: TEXT - 1]}…"
    at = position - int(batch.real[sequence].argmax())
    return InputError(
        f"the knockout would hide every key from token {at} (counted from 0) of the prompt "
        f"{shown!r}. Limit the knockout to a region that does not begin the prompt (region:), put "
        "the begin-of-sequence token in front (bos: true, if the tokenizer has one), or leave "
        "the prompt out",
        code=error.code,
        **error.values,
    )


def _keys(
    intervention: KnockoutSpec, tokenizer: Any, batch: PaddedBatch, classes: Iterable[ClassSet]
) -> Mask:
    """[B, N]: the tokens meant."""
    keys = (
        batch.real.copy()
        if intervention.region is None
        else batch.mask(intervention.region, some=True)
    )
    if intervention.tokens is None:
        return keys
    for one in classes:
        if intervention.tokens in one.names:
            ids = one.ids(batch.input_ids, tokenizer, batch.real)
            keys &= ids == one.index(intervention.tokens)
            return keys
    raise AssertionError(intervention.tokens)  # the plan has checked the class
