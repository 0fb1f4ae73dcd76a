"""Queries of a batch cut into pieces that a kernel takes in one go, with the keys they see.

A piece is a few sequences times a few rows. Its spans are plain integers, so that one look at the
intervals serves every layer; the masks a piece needs are made when asked for. Short texts of a
batch go together, because each operation costs as much to start as a thousand scores cost.

Must not know what is done with a piece.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Elements of masks kept from one layer for the next: more would be made again, layer by layer.
CACHE_ELEMENTS = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Some rows of some sequences. Keys `low … high` are seen by any of them, and all of
    `dense_from … dense_to` by all."""

    sequences: slice
    rows: slice
    low: int
    high: int
    dense_from: int
    dense_to: int

    @property
    def empty(self) -> bool:
        """Whether no row sees anything."""
        return self.high <= self.low

    def is_dense(self, left: int, right: int) -> bool:
        """Whether these keys need no mask."""
        return self.dense_from <= left and right <= self.dense_to


def balanced_step(size: int, step: int) -> int:
    """The largest step up to `step` that cuts `size` into steps of about one size."""
    count = -(-size // max(1, min(step, size)))
    return -(-size // count)


def make_tiles(start: Tensor, stop: Tensor, sequences: int, rows: int) -> list[list[Tile]]:
    """Pieces of up to this many sequences and rows, those of the same sequences in one list."""
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
    """bool [sequences, 1, rows, keys]: who of a piece sees which of the keys `left … right`."""
    keys = torch.arange(left, right, device=start.device, dtype=start.dtype)
    index = tile.sequences, tile.rows
    mask = (keys >= start[index][..., None]) & (keys < stop[index][..., None])
    if real is not None:
        mask &= real[tile.sequences, None, left:right]
    return mask[:, None]


@dataclass(slots=True, eq=False)
class BoundedCache:
    """Tensors that are the same for every layer of a pass, as many as there is room for."""

    budget: int = CACHE_ELEMENTS
    kept: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)

    def keep(self, key: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Put these away, if they fit, and hand them back."""
        size = sum(tensor.numel() for tensor in tensors)
        if size <= self.budget:
            self.budget -= size
            self.kept[key] = tensors
        return tensors
