"""What a condition does to the model while it reads: the interventions, on a batch of prompts.

This module must not know measures or files.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from attnscope.interventions.arm import arm
from attnscope.interventions.knockout import knockout
from attnscope.interventions.steer import steer
from attnscope.spec.conditions import Condition, KnockoutSpec
from attnscope.tokens import ClassSet
from attnscope.tokens.tokenized import Mask, PaddedBatch


@contextmanager
def intervening(
    condition: Condition,
    model: Any,
    tokenizer: Any,
    batch: PaddedBatch,
    classes: Iterable[ClassSet],
    among: Mask | None = None,
) -> Iterator[None]:
    """Inside, the model is as the condition wants it. Tokens are of the first of the class sets
    that has such a class; `among` bool [B, N] leaves out those that do not count."""
    with ExitStack() as undo:
        for cut in (condition.knockout, condition.steer):
            if cut is None:
                continue
            keys = _keys(cut, tokenizer, batch, classes)
            if among is not None:
                keys &= among
            if not keys.any():
                continue  # no prompt of this batch has such a token
            where: dict[str, Any] = {"layers": cut.layers, "heads": cut.heads}
            where["keys"] = torch.from_numpy(keys)
            if cut is condition.steer:
                undo.enter_context(steer(model, factor=condition.steer.factor, **where))
            else:
                undo.enter_context(knockout(model, **where))
        if condition.arm is not None:
            undo.enter_context(arm(model, **condition.arm.model_dump()))
        yield


def _keys(
    cut: KnockoutSpec, tokenizer: Any, batch: PaddedBatch, classes: Iterable[ClassSet]
) -> Mask:
    """[B, N]: the tokens meant."""
    keys = batch.real.copy() if cut.region is None else batch.mask(cut.region, some=True)
    if cut.tokens is None:
        return keys
    for one in classes:
        if cut.tokens in one.names:
            ids = one.ids(batch.input_ids, tokenizer, batch.real)
            keys &= ids == one.index(cut.tokens)
            return keys
    raise AssertionError(cut.tokens)  # whoever made the condition has looked
