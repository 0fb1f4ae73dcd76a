"""Scores of blocks of rows, for all kernels in torch: what the softmax takes.

score = soft-cap(scale · q kᵀ) + key bias + distance bias + score biases; hidden where a row does
not see a key. Products are float64 where scores are large.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnscope.kernels.call import distance_index, total_score_bias
from attnscope.kernels.rows import KernelRows
from attnscope.kernels.tile_plan import Tile, balanced_step, make_tiles

# Rows of a tile: the fewer, the less of a causal tile is in its future; the more, the fewer
# operators run. However long the text, reading the keys must not cost more than the products.
LEAST, MOST = 16, 128
# Rows that are added up at once: a longer sum in float32 has a larger error than a softmax.
CHUNK = 16


def score_tiles(
    rows: KernelRows, large: list[list[bool]], *, elements: int, hidden: float
) -> Iterator[tuple[Tile, slice, Tensor, Tensor]]:
    """Yields tile, heads and scores as `block_scores` does, and a float32 tensor of the same shape
    to write to. The next tile overwrites both: new memory for each would take twice the time."""
    size = _tiles_of(rows, elements)[2]
    buffers: dict[torch.dtype, Tensor] = {}
    spare = rows.q.new_empty(size, dtype=torch.float32)
    for tile, heads, keys in key_blocks(rows, large, elements):
        if keys.dtype not in buffers:
            buffers[keys.dtype] = keys.new_empty(size)
        x = block_scores(rows, tile, heads, keys, hidden, buffers[keys.dtype])
        yield tile, heads, x, spare[: x.numel()].view_as(x)


def key_blocks(
    rows: KernelRows, large: list[list[bool]], elements: int
) -> Iterator[tuple[Tile, slice, Tensor]]:
    """Yields every tile with visible keys, some heads, and their keys [sequences, groups, K, D].

    Args:
        rows: The rows.
        large: Whether products need float64, for each sequence and key/value head.
        elements: The size of a tile, except for the least number of rows.
    """
    G, R = rows.k.shape[1], rows.q.shape[1] // rows.k.shape[1]
    tiles, groups, _ = _tiles_of(rows, elements)
    exact = torch.promote_types(rows.q.dtype, torch.float32)
    for same in tiles:
        for g in range(0, G, groups):
            some, kv = same[0].sequences, slice(g, min(g + groups, G))
            wide = any(any(each[kv]) for each in large[some])
            keys = rows.k[some, kv].to(torch.float64 if wide else exact)
            for tile in same:
                if not tile.empty:
                    yield tile, slice(g * R, kv.stop * R), keys


def block_scores(
    rows: KernelRows,
    tile: Tile,
    heads: slice,
    keys: Tensor,
    hidden: float,
    buffer: Tensor | None = None,
) -> Tensor:
    """[sequences, heads, rows, keys]: the scores of the keys `low … high` of a tile.

    `keys` [sequences, groups, K, D] has the dtype of the products. `buffer` is for the result.
    """
    q = rows.q[tile.sequences, heads, tile.rows].to(keys.dtype) * rows.scale
    B, H, T, D = q.shape
    q, k = q.reshape(B, keys.shape[1], -1, D), keys[:, :, tile.low : tile.high].transpose(2, 3)
    if buffer is not None:
        size = q.shape[2] * k.shape[3]
        buffer = buffer[: B * len(keys[0]) * size].view(*q.shape[:3], -1)
    x = torch.matmul(q, k, out=buffer).view(B, H, T, -1)
    if rows.softcap is not None:
        x = x.div_(rows.softcap).tanh_() * rows.softcap
    for bias in block_biases(rows, tile, heads, hidden):
        x += bias
    for left, right in masked_spans(rows, tile):
        x[..., left - tile.low : right - tile.low] += block_mask(rows, tile, left, right, hidden)
    return x


def block_biases(rows: KernelRows, tile: Tile, heads: slice, hidden: float) -> Iterator[Tensor]:
    """What is added to the scores of a tile, broadcast to [sequences, heads, rows, keys]."""
    if rows.key_bias is not None:
        some = tile.sequences if len(rows.key_bias) > 1 else slice(None)
        yield rows.key_bias[some, heads, None, tile.low : tile.high]
    if rows.distance_bias is not None:
        table = rows.distance_bias[heads]
        self_key = rows.bounds()[2][tile.sequences, tile.rows]
        if bool((self_key == self_key[:1]).all()):  # one sequence serves all
            self_key = self_key[:1]
        index = distance_index(self_key, tile.low, tile.high, table.shape[1])
        yield table[:, index].transpose(0, 1)
    keys = slice(tile.low, tile.high)
    score_bias = total_score_bias(rows.score_biases, tile.sequences, heads, tile.rows, keys)
    if score_bias is not None:
        yield score_bias.clamp(min=hidden)


def block_mask(rows: KernelRows, tile: Tile, left: int, right: int, hidden: float) -> Tensor:
    """float32 [sequences, 1, rows, keys]: 0 for the keys `left … right` that a row sees."""
    start, stop, _ = rows.bounds()
    keys = torch.arange(left, right, device=start.device, dtype=start.dtype)
    index = tile.sequences, tile.rows
    visible = (keys >= start[index][..., None]) & (keys < stop[index][..., None])
    if rows.real is not None:
        visible &= rows.real[tile.sequences, None, left:right]
    return torch.where(visible[:, None], 0.0, hidden)


def masked_spans(rows: KernelRows, tile: Tile) -> list[tuple[int, int]]:
    """The spans of keys of a tile that some row does not see."""
    low, high = max(tile.low, tile.dense_from), min(tile.high, tile.dense_to)
    if rows.real is not None or low >= high:
        return [(tile.low, tile.high)]
    return [span for span in ((tile.low, low), (high, tile.high)) if span[0] < span[1]]


def _tiles_of(rows: KernelRows, elements: int) -> tuple[list[list[Tile]], int, int]:
    """The tiles, the key/value heads of each, and the size of the largest; cached for all layers
    that share them."""
    B, H, M, _ = rows.q.shape
    G, K = rows.k.shape[1:3]
    R, bounds = H // G, rows.bounds()
    most = max(MOST, elements >> 13)
    key: Any = "tiles", B, H, G, M, K, elements
    cached = rows.cache.get(key)
    if cached is None or not all(a is b for a, b in zip(cached[0], bounds, strict=True)):
        step = max(2 * LEAST, K // 4, elements // (B * H * K))
        step = balanced_step(M, min(most, max(LEAST, min(step, elements // (R * K)))))
        # The two draws of a stratum stay in one tile, and so do rows that are added up at once.
        step += -step % (CHUNK if step > 2 * CHUNK else 2)
        blocks = max(1, elements // (R * step * K))
        groups, sequences = min(G, blocks), balanced_step(B, blocks // G)
        tiles = make_tiles(*bounds, sequences, step)
        cached = rows.cache[key] = bounds, (tiles, groups, sequences * groups * R * step * K)
    result: tuple[list[list[Tile]], int, int] = cached[1]
    return result
