"""`knockout`: some queries can no longer attend to some keys."""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from attnscope.interventions.score_bias import bias_scores


def knockout(
    model: nn.Module,
    *,
    keys: Tensor | Sequence[int] | None = None,
    text: str | None = None,
    queries: str | Tensor = "all",
    layers: int | Iterable[int] | None = None,
    heads: int | Iterable[int] | Tensor | None = None,
    part: str | None = None,
    tokenizer: Any = None,
) -> AbstractContextManager[None]:
    """Remove the attention of some queries to some keys, inside a `with` block.

    This is attention knockout (ablation). The scores of these keys become -inf, so the weights of
    the other keys add up to 1. A `watch` inside the block measures the remaining attention.
    Blocks can be nested.

    Args:
        model: A transformers model.
        keys: The keys to hide: bool [batch, keys], where tokens after the last column stay
            visible; or positions such as [4, 5], if the batch has one sequence.
        text: Words of the prompt, in place of `keys`: every place that has them is hidden.
        queries: The queries that no longer see them: "all"; "last": the last prompt token;
            "generated"; "predicts": the last prompt token and the generated ones; or a bool
            tensor [batch, keys]. Default: "all".
        layers: The layers to change, in the model's own numbering; default: all.
        heads: The heads to change, numbered from 0, or a bool tensor [batch, heads] with a choice
            for each sequence; default: all.
        part: For a model with an encoder and a decoder: "encoder", "decoder" or "cross", whose
            keys are the encoder's tokens and whose queries are the decoder's.
        tokenizer: The tokenizer, for `text`; default: that of `attnscope.load`.

    Returns:
        A context manager. The model is unchanged after the block.

    Raises:
        InputError: An argument has a wrong shape or value, or a query would see no key.
        ModelError: The attention of this model cannot be changed.

    Examples:
        >>> import attnscope
        >>> model, tokenizer = attnscope.load("zoo:spatial-phys")
        >>> inputs = tokenizer("The ball is left of the box.", return_tensors="pt")
        >>> with attnscope.knockout(model, text="ball", queries="last"):
        ...     with attnscope.watch(model, queries="last") as scope:
        ...         _ = model(**inputs)
        >>> float(scope.received(0)[0, :, 1].sum())  # the last token no longer attends to it
        0.0
    """
    return bias_scores(
        model,
        bias=-math.inf,
        keys=keys,
        text=text,
        tokenizer=tokenizer,
        queries=queries,
        layers=layers,
        heads=heads,
        part=part,
    )
