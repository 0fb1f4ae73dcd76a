"""Compares the numbers of runs of two builds: `python tools/compare_runs.py BEFORE AFTER`.

Both are folders of runs with the same names. Tables are compared row by row after columns and
values were renamed as RENAMED says; every number must be equal to the last digit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import polars as pl

COLUMNS = {
    "twin": "aligned_position",
    "seam_tokens": "boundary_tokens",
    "base_seam_tokens": "base_boundary_tokens",
}
VALUES = {
    "measure": {
        "sink_mass": "learned_sink_mass",
        "even_slope": "uniform_slope",
        "even_ratio": "uniform_ratio",
    },
    "role": {"seam": "boundary"},
}
TABLES = ("values", "tokens", "positions", "by_query")


def table(run: Path, name: str) -> pl.DataFrame | None:
    """A table of a run, with today's names and in a fixed order."""
    files = sorted((run / "cells").glob(f"*.{name}.parquet"))
    if not files:
        return None
    frame = pl.concat([pl.read_parquet(file) for file in files])
    frame = frame.rename({old: new for old, new in COLUMNS.items() if old in frame.columns})
    frame = frame.with_columns(
        pl.col(column).replace(names) for column, names in VALUES.items() if column in frame.columns
    )
    floats = {c for c, kind in frame.schema.items() if kind in (pl.Float64, pl.Float32)}
    lists = {c for c, kind in frame.schema.items() if isinstance(kind, pl.List)}
    keys = [column for column in frame.columns if column not in floats | lists]
    return frame.sort(keys, nulls_last=True)


def differences(before: Path, after: Path) -> list[str]:
    """What differs between two runs, a sentence each."""
    reasons = []
    for name in TABLES:
        old, new = table(before, name), table(after, name)
        if (old is None) != (new is None):
            reasons.append(f"{name}: only one of the runs has this table")
        elif old is not None and new is not None:
            if sorted(old.columns) != sorted(new.columns) or old.height != new.height:
                reasons.append(f"{name}: {old.shape} {old.columns} and {new.shape} {new.columns}")
                continue
            columns = [c for c in old.columns if not old[c].equals(new[c], null_equal=True)]
            reasons += [f"{name}: column {column} differs" for column in columns]
    return reasons


def main() -> int:
    """Compare every run; 1 if anything differs."""
    parser = argparse.ArgumentParser(description="Compare the numbers of runs of two builds.")
    parser.add_argument("before", type=Path, help="folder of runs of the build before")
    parser.add_argument("after", type=Path, help="folder of runs of this build")
    options = parser.parse_args()
    runs = sorted(p.parent.name for p in options.before.glob("*/manifest.json"))
    failed = not runs
    for name in runs:
        reasons = differences(options.before / name, options.after / name)
        print(f"{name}: {'; '.join(reasons) or 'equal'}")
        failed = failed or bool(reasons)
    return failed


if __name__ == "__main__":
    sys.exit(main())
