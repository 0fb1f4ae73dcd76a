"""Bins lose no spike: the range is that of the tokens, the mean is theirs."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscope.figures.binning import binned


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=120),
    limit=st.integers(1, 50),
    start=st.integers(0, 5),
)
def test_bins_keep_mean_range_and_number(
    values: list[float | None], limit: int, start: int
) -> None:
    frame = pl.DataFrame(
        {"series": "a", "position": range(start, start + len(values)), "value": values},
        schema={"series": pl.String, "position": pl.Int32, "value": pl.Float64},
    )
    made, width = binned(frame, limit, by=["series"])
    assert made.height <= limit or width == 1
    assert (width == 1) == (len(values) <= limit)
    covered = []
    for row in made.iter_rows(named=True):
        covered += range(row["position"], row["last"] + 1)
        inside = values[row["position"] - start : row["last"] + 1 - start]
        known = [v for v in inside if v is not None]
        assert row["tokens"] == len(known)
        if known:
            assert row["min"] == min(known)
            assert row["max"] == max(known)
            assert row["value"] == pytest.approx(sum(known) / len(known))
        else:
            assert row["value"] is None
    assert covered == list(range(start, start + len(values)))
