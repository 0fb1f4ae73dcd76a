"""Texts that a batch has padded on the left, seen as they are: each begins at its first token.

A model answers a batch that is padded on the left. Everything else goes by the position of a token
in its own text, so what was measured is moved here, and what is asked of it is moved back.

Shapes: B prompts, `left` [B] tokens of padding before each, K keys of the batch, `width` tokens of
the longest text.

This module must not know models, measures or files.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnscope.measures.layer import PerQuery, Sums


def to_left(values: Tensor, left: Tensor, width: int, fill: float = 0) -> Tensor:
    """What the columns of texts [B, n, …] say, at their places behind the padding [B, width, …]."""
    return _moved(values, -left, width, fill, 1)


def _moved(values: Tensor, by: Tensor, width: int, fill: float, axis: int) -> Tensor:
    """Column j of the result is column j + by of `values`; `fill` where there is none."""
    at = torch.arange(width, device=values.device) + by.to(values.device)[:, None]
    there = (at >= 0) & (at < values.shape[axis])
    shape = [1] * values.ndim
    shape[0], shape[axis] = at.shape
    at, there = at.clamp(0, max(values.shape[axis] - 1, 0)).view(shape), there.view(shape)
    whole = list(values.shape)
    whole[axis] = width
    return values.gather(axis, at.expand(whole)).where(there, fill)


def texts_sums(sums: Sums, left: Tensor, width: int) -> Sums:
    """The sums of a batch, by positions in the texts."""
    padding = left.to(sums.count)

    def exposed(name: str) -> Tensor:
        value = sums.visibility(name)
        if name == "position":
            return value - sums.count.to(value) * left.to(value)
        return value if name == "groups" else _moved(value, left, width, 0, 1)

    sink = sums.sink_position
    if sink is not None:
        assert sums.sink is not None
        sink = sink - sums.sink * padding[:, None]
    return replace(
        sums,
        received=_moved(sums.received, left, width, 0, 2),
        received_later=_moved(sums.received_later, left, width, 0, 2),
        first_token=sums.first_token - left.to(sums.first_token),
        visibility=exposed,
        sink_position=sink,
    )


def texts_single(single: PerQuery, left: Tensor, keys: int) -> PerQuery:
    """Single queries of a batch, by positions in the texts; `keys` are those of the batch."""
    padding = left.to(single.positions)[:, None]

    def read(name: str, *asked: Any) -> Any:
        if name == "rows":
            classes, n = asked
            given = torch.as_tensor(classes)
            fill = 0 if given.is_floating_point() else -1
            return single.read(name, to_left(given, left, keys, fill), n)
        if name == "weight":
            (key_of,) = asked
            return single.read(name, (key_of + padding).where(key_of >= 0, -1))
        told = single.read(name, *asked)
        if name == "largest":
            key, *rest = told
            return [(key - padding[:, None, :, None]).where(key >= 0, -1), *rest]
        return told

    where = single.positions
    return replace(single, positions=(where - padding).where(where >= 0, -1), read=read)
