"""Texts that a batch has padded on the left, seen as they are: each begins at its first token.

A model answers a batch that is padded on the left. Everything else goes by the position of a token
in its own text, so what was measured is moved here, and what is asked of it is moved back.

Shapes: B prompts, `left` [B] tokens of padding before each, K keys of the batch, `width` tokens of
the longest text.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnscope.measures.layer import PerQuery, Sums


def pad_left(values: Tensor, left: Tensor, width: int, fill: float = 0) -> Tensor:
    """What the columns of texts [B, n, …] say, at their places behind the padding [B, width, …]."""
    return _moved(values, -left, width, fill, 1)


def _moved(values: Tensor, by: Tensor, width: int, fill: float, axis: int) -> Tensor:
    """Column j of the result is column j + by of `values`; `fill` where there is none."""
    at = torch.arange(width, device=values.device) + by.to(values.device)[:, None]
    inside = (at >= 0) & (at < values.shape[axis])
    shape = [1] * values.ndim
    shape[0], shape[axis] = at.shape
    at, inside = at.clamp(0, max(values.shape[axis] - 1, 0)).view(shape), inside.view(shape)
    shape_of_result = list(values.shape)
    shape_of_result[axis] = width
    return values.gather(axis, at.expand(shape_of_result)).where(inside, fill)


def unpad_sums(sums: Sums, left: Tensor, width: int) -> Sums:
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


@dataclass(eq=False, kw_only=True)
class UnpaddedQueries(PerQuery):
    """The queries of a batch, by positions in the texts."""

    padding: Tensor
    """int64 [B]: the tokens before each text."""
    keys: int
    """Of the batch."""

    def mass(self, classes: Tensor, n: int) -> Tensor:
        """As of `PerQuery`."""
        table = torch.as_tensor(classes)
        fill = 0 if table.is_floating_point() else -1
        return super().mass(pad_left(table, self.padding, self.keys, fill), n)

    def weight(self, key_of: Tensor) -> Tensor:
        """As of `PerQuery`."""
        left = self.padding.to(key_of)[:, None]
        return super().weight((key_of + left).where(key_of >= 0, -1))

    def largest(self) -> tuple[Tensor, Tensor, Tensor]:
        """As of `PerQuery`."""
        key, weight, score = super().largest()
        left = self.padding.to(key.device)[:, None, None]
        return (key - left).where(key >= 0, -1), weight, score


def unpad_rows(single: PerQuery, left: Tensor, keys: int) -> PerQuery:
    """The queries of a batch, by positions in the texts; `keys` are those of the batch."""
    where = single.positions
    positions = (where - left.to(where)[:, None]).where(where >= 0, -1)
    return UnpaddedQueries(
        **{**vars(single), "positions": positions}, padding=left.to(where.device), keys=keys
    )
