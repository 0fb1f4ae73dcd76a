"""What a condition does to the model while it reads: the interventions, on a batch of prompts.

This module must not know measures or files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import numpy as np
import torch

from attnscope.experiment.measured import Mask
from attnscope.experiment.padded import Padded
from attnscope.experiment.shifted import to_left
from attnscope.interventions.arm import arm
from attnscope.interventions.knockout import knockout
from attnscope.interventions.steer import steer
from attnscope.question.conditions import Condition, Cut


@contextmanager
def intervening(
    condition: Condition, model: Any, padded: Padded, side: Literal["left", "right"] = "right"
) -> Iterator[None]:
    """Inside, the model is as the condition wants it; the batch is padded on this side."""
    with ExitStack() as undo:
        for cut in (condition.knockout, condition.steer):
            keys = None if cut is None else torch.from_numpy(_keys(cut, padded))
            if keys is not None and side == "left":
                left = keys.shape[1] - torch.from_numpy(padded.real).sum(1)
                keys = to_left(keys, left, keys.shape[1], False)
            if cut is None or keys is None or not bool(keys.any()):
                continue  # no prompt of this batch has such a token
            where: dict[str, Any] = {"keys": keys, "layers": cut.layers, "heads": cut.heads}
            if cut is condition.steer:
                undo.enter_context(steer(model, factor=condition.steer.factor, **where))
            else:
                undo.enter_context(knockout(model, **where))
        if condition.arm is not None:
            undo.enter_context(arm(model, **condition.arm.model_dump()))
        yield


def _keys(cut: Cut, padded: Padded) -> Mask:
    """[B, K]: the tokens meant."""
    keys = padded.real if cut.region is None else padded.region(cut.region)
    if cut.tokens is None:
        return keys
    for classes in padded.classes.values():
        if cut.tokens in classes.names:
            ids = classes.ids(padded.batch.input_ids, padded.tokenizer, padded.real)
            return np.asarray(keys & (ids == classes.index(cut.tokens)))
    raise AssertionError(cut.tokens)  # the plan has looked
