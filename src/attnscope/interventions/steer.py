"""`steer`: some keys get more attention, or less."""

import math
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from attnscope.errors import InputError
from attnscope.interventions.links import linking


def steer(
    model: nn.Module, *, keys: Any, factor: float, layers: Any = None, heads: Any = None
) -> AbstractContextManager[None]:
    """Scale the attention on some keys up or down, inside a `with` block.

        with attnscope.steer(model, keys=question, factor=3.0, layers=range(10, 20)):
            model.generate(**inputs)

    The logarithm of `factor` is added to the scores of these keys: before the softmax divides, each
    of them weighs `factor` times as much. `keys`, `layers` and `heads` are those of `knockout`.
    """
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not number or not 0 < factor < math.inf:
        raise InputError(
            f"factor={factor!r}: give a number above 0 (1 changes nothing; knockout removes the "
            "attention altogether)",
            code="value-out-of-range",
            argument="factor",
            value=factor,
        )
    bias = math.log(factor)
    return linking(model, bias=bias, queries="all", keys=keys, layers=layers, heads=heads)
