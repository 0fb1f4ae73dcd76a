"""Cutting a batch into pieces: every row once, and spans that say who sees what."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from attnscope.kernels.tile_plan import BoundedCache, balanced_step, make_tiles


@st.composite
def intervals(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Any intervals at all, empty ones among them."""
    B, M, K = draw(st.integers(1, 5)), draw(st.integers(1, 12)), draw(st.integers(1, 12))
    torch.manual_seed(draw(st.integers(0, 10_000)))
    bounds = torch.randint(0, K + 1, (2, B, M), dtype=torch.int32).sort(0).values
    return bounds[0], bounds[1]


@settings(max_examples=200, deadline=None)
@given(intervals(), st.integers(1, 6), st.integers(1, 13))
def test_tiles_cover_the_batch_and_its_visible_keys(
    bounds: tuple[torch.Tensor, torch.Tensor], sequences: int, rows: int
) -> None:
    start, stop = bounds
    self_key = torch.randint(0, 13, start.shape)
    keys = torch.arange(12)
    visible = (keys >= start[..., None]) & (keys < stop[..., None])
    future = (visible & (keys > self_key[..., None])).any(-1)
    times = torch.zeros_like(start)
    for tiles in make_tiles(start, stop, self_key, sequences, rows):
        for tile in tiles:
            assert tile.sequences == tiles[0].sequences
            there = tile.sequences, tile.rows
            times[there] += 1
            assert times[there].shape[0] <= sequences
            assert times[there].shape[1] <= rows
            everything = visible[there]
            assert tile.no_future == (not future[there].any())
            assert tile.empty == (not everything.any())
            if tile.empty:
                continue
            seen = everything.flatten(0, 1).any(0).nonzero()[:, 0]
            assert (tile.low, tile.high) == (int(seen[0]), int(seen[-1]) + 1)
            for left in range(tile.low, tile.high):
                for right in range(left + 1, tile.high + 1):
                    dense = tile.dense_from <= left and right <= tile.dense_to
                    assert dense == bool(everything[..., left:right].all())
    assert (times == 1).all()


@given(st.integers(1, 1000), st.integers(0, 1200))
def test_even_steps_are_no_more_and_no_longer(size: int, step: int) -> None:
    length = balanced_step(size, step)
    assert 1 <= length <= max(1, step)
    assert -(-size // length) == -(-size // max(1, min(step, size)))


def test_a_store_keeps_what_fits() -> None:
    store = BoundedCache(budget=10)
    kept, lost = torch.zeros(8), torch.zeros(3)
    assert store.keep("kept", kept) is kept
    assert store.keep("lost", lost) is lost
    assert list(store.kept) == ["kept"]
