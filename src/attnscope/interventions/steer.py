"""`steer`: some keys get more attention, or less."""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from attnscope.errors import InputError
from attnscope.interventions.score_bias import bias_scores


def steer(
    model: nn.Module,
    *,
    factor: float,
    keys: Tensor | Sequence[int] | None = None,
    text: str | None = None,
    layers: int | Iterable[int] | None = None,
    heads: int | Iterable[int] | Tensor | None = None,
    part: str | None = None,
    tokenizer: Any = None,
) -> AbstractContextManager[None]:
    """Scale the attention on some keys up or down, inside a `with` block.

    ln(factor) is added to the scores of these keys. Before the softmax normalizes, each of them
    has `factor` times its weight. A `watch` inside the block measures the changed attention.

    Args:
        model: A transformers model.
        factor: A number above 0; 1 changes nothing. To remove keys, use `knockout`.
        keys: The keys to scale, as in `knockout`: a bool tensor [batch, keys], or positions of
            one sequence.
        text: Words of the prompt in place of `keys`.
        layers: The layers to change, in the model's own numbering; default: all.
        heads: The heads to change, numbered from 0, or a bool tensor [batch, heads] with a choice
            for each sequence; default: all.
        part: Of a model with an encoder and a decoder, as in `knockout`.
        tokenizer: Finds `text`; default: the one that `attnscope.load` returned with the model.

    Returns:
        A context manager. The model is unchanged after the block.

    Raises:
        InputError: An argument has a wrong shape or value.
        ModelError: The attention of this model cannot be changed.

    Examples:
        >>> import attnscope
        >>> model, tokenizer = attnscope.load("zoo:spatial-phys")
        >>> inputs = tokenizer("The ball is left of the box.", return_tensors="pt")
        >>> with attnscope.watch(model, layers=0) as before:
        ...     _ = model(**inputs)
        >>> with attnscope.steer(model, text="ball", factor=3.0), attnscope.watch(model) as after:
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
    return bias_scores(
        model,
        bias=math.log(factor),
        keys=keys,
        text=text,
        tokenizer=tokenizer,
        queries="all",
        layers=layers,
        heads=heads,
        part=part,
    )
