"""Tiles: groups of queries that a kernel processes in one step, with their visible keys.

A tile is a few sequences times a few rows. Its bounds are Python integers, so that one read of the
visible ranges serves every layer; masks are computed on demand. Short texts of a batch share a
tile, because starting an operation costs as much as a thousand scores.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Largest number of mask elements that the cache keeps for the next layers.
CACHE_ELEMENTS = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Some rows of some sequences. Some row sees each of the keys `low … high`; all rows see all of
    `dense_from … dense_to`. With `no_future`, no row sees a key after its own token."""

    sequences: slice
    rows: slice
    low: int
    high: int
    dense_from: int
    dense_to: int
    no_future: int

    @property
    def empty(self) -> bool:
        """Whether no row has visible keys."""
        return self.high <= self.low


def balanced_step(size: int, step: int) -> int:
    """The step, at most `step`, that splits `size` into parts of about equal size."""
    count = -(-size // max(1, min(step, size)))
    return -(-size // count)


def make_tiles(
    start: Tensor, stop: Tensor, self_key: Tensor, sequences: int, rows: int
) -> list[list[Tile]]:
    """Tiles of up to this many sequences and rows, one list for each group of sequences."""
    (B, M), sees = start.shape, stop > start
    first, last = start.where(sees, torch.iinfo(start.dtype).max), stop.where(sees, 0)
    causal = ~sees | (stop <= self_key + 1)
    tiles = [[(some, block) for block in _blocks(M, rows)] for some in _blocks(B, sequences)]
    bounds = [
        (first[at].amin(), last[at].amax(), start[at].amax(), stop[at].amin(), causal[at].all())
        for same in tiles
        for at in same
    ]
    numbers = iter(torch.stack([torch.stack(each) for each in bounds]).tolist())  # one read
    return [[Tile(*at, *next(numbers)) for at in same] for same in tiles]


def _blocks(size: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, size)) for at in range(0, size, step)]


@dataclass(slots=True, eq=False)
class BoundedCache:
    """A cache for tensors that all layers of a pass share, limited by their elements."""

    budget: int = CACHE_ELEMENTS
    kept: dict[Any, Tensor] = field(default_factory=dict)

    def keep(self, key: Any, tensor: Tensor) -> Tensor:
        """Store this tensor if it fits, and return it."""
        if tensor.numel() <= self.budget:
            self.budget -= tensor.numel()
            self.kept[key] = tensor
        return tensor
