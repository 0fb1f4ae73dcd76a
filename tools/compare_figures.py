"""Compares the numbers of figures of two builds: `python tools/compare_figures.py BEFORE AFTER`.

Both are folders with a folder per run, which holds the CSV files of its figures. Columns are
compared by name; every value must be equal as text, and rows may stand in another order.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import polars as pl


def differences(before: Path, after: Path) -> list[str]:
    """What differs between two CSV files, a sentence each."""
    old, new = (pl.read_csv(path, infer_schema=False) for path in (before, after))
    gone = [column for column in old.columns if column not in new.columns]
    reasons = [f"without the columns {', '.join(gone)}"] if gone else []
    shared = [column for column in old.columns if column in new.columns]
    if old.height != new.height:
        return [*reasons, f"{old.height} rows, then {new.height}"]
    left, right = (frame.select(shared).sort(shared, nulls_last=True) for frame in (old, new))
    changed = [c for c in shared if not left[c].equals(right[c], null_equal=True)]
    if changed:
        reasons.append(f"other values of {', '.join(changed)}")
    elif not old.select(shared).equals(new.select(shared), null_equal=True):
        reasons.append("rows in another order")
    return reasons


def main() -> int:
    """Compare every figure that the build before drew; 1 if values differ or a figure is gone."""
    parser = argparse.ArgumentParser(description="Compare the numbers of figures of two builds.")
    parser.add_argument("before", type=Path, help="folder of the build before")
    parser.add_argument("after", type=Path, help="folder of this build")
    options = parser.parse_args()
    files = sorted(options.before.glob("*/*.csv"))
    failed = not files
    for file in files:
        name = file.relative_to(options.before)
        other = options.after / name
        reasons = differences(file, other) if other.is_file() else ["not drawn"]
        print(f"{name}: {'; '.join(reasons) or 'equal'}")
        failed = failed or bool([r for r in reasons if r != "rows in another order"])
    print(f"{len(files)} figures")
    return failed


if __name__ == "__main__":
    sys.exit(main())
