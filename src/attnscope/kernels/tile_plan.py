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
    `dense_from … dense_to`."""

    sequences: slice
    rows: slice
    low: int
    high: int
    dense_from: int
    dense_to: int

    @property
    def empty(self) -> bool:
        """Whether no row has visible keys."""
        return self.high <= self.low

    def is_dense(self, left: int, right: int) -> bool:
        """Whether all rows see all of these keys, so that no mask is needed."""
        return self.dense_from <= left and right <= self.dense_to


def balanced_step(size: int, step: int) -> int:
    """The step, at most `step`, that splits `size` into parts of about equal size."""
    count = -(-size // max(1, min(step, size)))
    return -(-size // count)


def make_tiles(start: Tensor, stop: Tensor, sequences: int, rows: int) -> list[list[Tile]]:
    """Tiles of up to this many sequences and rows, one list for each group of sequences."""
    B, M = start.shape
    first = start.where(stop > start, torch.iinfo(start.dtype).max)
    last = stop.where(stop > start, 0)
    blocks = _blocks(M, rows)
    lows = torch.stack([first[:, block].amin(1) for block in blocks])
    highs = torch.stack([last[:, block].amax(1) for block in blocks])
    starts = torch.stack([start[:, block].amax(1) for block in blocks])
    stops = torch.stack([stop[:, block].amin(1) for block in blocks])
    return [
        [
            Tile(some, block, *span)
            for block, *span in zip(
                blocks,
                lows[:, some].amin(1).tolist(),
                highs[:, some].amax(1).tolist(),
                starts[:, some].amax(1).tolist(),
                stops[:, some].amin(1).tolist(),
                strict=True,
            )
        ]
        for some in _blocks(B, sequences)
    ]


def causal_tiles(B: int, M: int, sequences: int, rows: int) -> list[list[Tile]]:
    """The tiles of causal rows, computed without reading a tensor."""
    return [
        [Tile(some, block, 0, block.stop, 0, block.start + 1) for block in _blocks(M, rows)]
        for some in _blocks(B, sequences)
    ]


def diagonal_tiles(first: int, B: int, M: int, sequences: int, rows: int) -> list[list[Tile]]:
    """The tiles of rows that see only their own token; the tokens are in order from `first`."""
    self_key = [(m, first + m.start, first + m.stop) for m in _blocks(M, rows)]
    return [
        [Tile(some, block, low, high, high - 1, low + 1) for block, low, high in self_key]
        for some in _blocks(B, sequences)
    ]


def _blocks(size: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, size)) for at in range(0, size, step)]


def tile_mask(
    tile: Tile, left: int, right: int, start: Tensor, stop: Tensor, real: Tensor | None
) -> Tensor:
    """bool [sequences, 1, rows, keys]: which of the keys `left … right` each row sees."""
    keys = torch.arange(left, right, device=start.device, dtype=start.dtype)
    index = tile.sequences, tile.rows
    mask = (keys >= start[index][..., None]) & (keys < stop[index][..., None])
    if real is not None:
        mask &= real[tile.sequences, None, left:right]
    return mask[:, None]


@dataclass(slots=True, eq=False)
class BoundedCache:
    """A cache for tensors that all layers of a pass share, limited by their elements."""

    budget: int = CACHE_ELEMENTS
    kept: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)

    def keep(self, key: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Store these tensors if they fit, and return them."""
        size = sum(tensor.numel() for tensor in tensors)
        if size <= self.budget:
            self.budget -= size
            self.kept[key] = tensors
        return tensors
