"""`steer`: some keys get more attention, or less."""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import Tensor, nn

from attnscope.errors import InputError
from attnscope.interventions.score_bias import bias_scores


def steer(
    model: nn.Module,
    *,
    keys: Tensor,
    factor: float,
    layers: int | Iterable[int] | None = None,
    heads: int | Iterable[int] | Tensor | None = None,
) -> AbstractContextManager[None]:
    """Scale the attention on some keys up or down, inside a `with` block.

    ln(factor) is added to the scores of these keys. Before the softmax normalizes, each of them
    has `factor` times its weight. A `watch` inside the block measures the changed attention.

    Args:
        model: A transformers model.
        keys: Bool [batch, keys], the keys to scale. Tokens after the last column stay the same.
        factor: A number above 0; 1 changes nothing. To remove keys, use `knockout`.
        layers: The layers to change, in the model's own numbering; default: all.
        heads: The heads to change, numbered from 0, or a bool tensor [batch, heads] with a choice
            for each sequence; default: all.

    Returns:
        A context manager. The model is unchanged after the block.

    Raises:
        InputError: An argument has a wrong shape or value.
        ModelError: The attention of this model cannot be changed.

    Example:
        >>> import attnscope
        >>> model, tokenizer = attnscope.load("zoo:spatial-phys")
        >>> inputs = tokenizer("The ball is left of the box.", return_tensors="pt")
        >>> ball = inputs.input_ids == inputs.input_ids[0, 1]
        >>> with attnscope.watch(model, layers=0) as before:
        ...     _ = model(**inputs)
        >>> with attnscope.steer(model, keys=ball, factor=3.0), attnscope.watch(model) as after:
        ...     _ = model(**inputs)
        >>> bool((after.received(0)[0, :, 1] > before.received(0)[0, :, 1]).all())
        True
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
    return bias_scores(model, bias=bias, queries="all", keys=keys, layers=layers, heads=heads)
