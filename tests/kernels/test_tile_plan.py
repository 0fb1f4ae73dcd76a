"""Cutting a batch into pieces: every row once, and spans that say who sees what."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from attnscope.kernels.tile_plan import (
    BoundedCache,
    Tile,
    balanced_step,
    causal_tiles,
    diagonal_tiles,
    make_tiles,
    tile_mask,
)


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
    times = torch.zeros_like(start)
    for tiles in make_tiles(start, stop, sequences, rows):
        for tile in tiles:
            assert tile.sequences == tiles[0].sequences
            there = tile.sequences, tile.rows
            times[there] += 1
            assert times[there].shape[0] <= sequences
            assert times[there].shape[1] <= rows
            everything = tile_mask(tile, 0, 12, start, stop, None)[:, 0]
            assert tile.empty == (not everything.any())
            if tile.empty:
                continue
            seen = everything.flatten(0, 1).any(0).nonzero()[:, 0]
            assert (tile.low, tile.high) == (int(seen[0]), int(seen[-1]) + 1)
            for left in range(tile.low, tile.high):
                for right in range(left + 1, tile.high + 1):
                    assert tile.is_dense(left, right) == bool(everything[..., left:right].all())
    assert (times == 1).all()


@given(st.integers(1, 1000), st.integers(0, 1200))
def test_even_steps_are_no_more_and_no_longer(size: int, step: int) -> None:
    length = balanced_step(size, step)
    assert 1 <= length <= max(1, step)
    assert -(-size // length) == -(-size // max(1, min(step, size)))


def test_a_store_keeps_what_fits() -> None:
    store = BoundedCache(budget=10)
    kept, lost = torch.zeros(8), torch.zeros(3)
    assert store.keep("kept", kept)[0] is kept
    assert store.keep("lost", lost)[0] is lost
    assert list(store.kept) == ["kept"]


@pytest.mark.parametrize(
    ("B", "M", "sequences", "rows"), [(1, 1, 1, 1), (3, 11, 2, 4), (5, 8, 5, 8)]
)
def test_tiles_by_arithmetic_equal_those_from_bounds(
    B: int, M: int, sequences: int, rows: int
) -> None:
    def spans(tiles: list[list[Tile]]) -> list[list[tuple[object, ...]]]:
        names = ("sequences", "rows", "low", "high", "dense_from", "dense_to")
        return [[tuple(getattr(p, name) for name in names) for p in some] for some in tiles]

    self_key = torch.arange(M).expand(B, M)
    seen = make_tiles(torch.zeros_like(self_key), self_key + 1, sequences, rows)
    assert spans(causal_tiles(B, M, sequences, rows)) == spans(seen)
    for first in (0, 7):
        alone = make_tiles(self_key + first, self_key + first + 1, sequences, rows)
        assert spans(diagonal_tiles(first, B, M, sequences, rows)) == spans(alone)
