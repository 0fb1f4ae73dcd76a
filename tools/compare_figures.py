"""Compares the numbers of figures of two builds: `python tools/compare_figures.py BEFORE AFTER`.

Both are folders with a folder per run, which holds the CSV files of its figures. Columns are
compared by name, rows by the columns that locate them; every value must be equal as text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import polars as pl

NUMBERS = ("value", "low", "high", "difference", "effect", "p", "q", "significant", "tokens")
"""Columns that are never keys, even if all their values are whole."""


def differences(before: Path, after: Path) -> list[str]:
    """What differs between two CSV files, a sentence each."""
    old, new = (pl.read_csv(path, infer_schema=False) for path in (before, after))
    gone = [column for column in old.columns if column not in new.columns]
    reasons = [f"without the columns {', '.join(gone)}"] if gone else []
    shared = [column for column in old.columns if column in new.columns]
    keys = [column for column in shared if _is_key(column, old, new)]
    numbered = [
        frame.select(shared).with_columns(pl.int_range(pl.len()).over(keys).alias("repeat"))
        for frame in (old, new)
    ]
    both = numbered[0].join(numbered[1], on=[*keys, "repeat"], suffix=" after", nulls_equal=True)
    if both.height < max(old.height, new.height):
        reasons.append(f"{old.height} rows, then {new.height}, {both.height} in both")
    changed = [
        f"{column} by {_largest(both[column], both[f'{column} after'])}"
        for column in shared
        if column not in keys and not both[column].equals(both[f"{column} after"], null_equal=True)
    ]
    if changed:
        reasons.append(f"other values of {', '.join(changed)}")
    elif not reasons and not old.select(shared).equals(new.select(shared), null_equal=True):
        reasons.append("rows in another order")
    return reasons


def _is_key(column: str, *frames: pl.DataFrame) -> bool:
    """Whether a column locates a row: names, whole numbers but n, and bins."""
    if column in ("place", "end", "share"):
        return True
    texts = pl.concat([frame[column].drop_nulls() for frame in frames])
    floats = (
        texts.str.contains(r"[.e]").any()
        and texts.cast(pl.Float64, strict=False).is_not_null().all()
    )
    return not floats and column not in (*NUMBERS, "n")


def _largest(old: pl.Series, new: pl.Series) -> str:
    """The largest change, relative to the largest value; or how many names or blanks changed."""
    left, right = (s.cast(pl.Float64, strict=False) for s in (old, new))
    blank = int((left.is_null() != right.is_null()).sum())
    if left.null_count() == left.len() and right.null_count() == right.len():
        return f"{(old != new).sum()} names"
    size = max(left.abs().drop_nulls().to_list(), default=1.0)
    change = max((left - right).abs().drop_nulls().to_list(), default=0.0)
    text = f"{change:.1g} of {size:.3g}"
    return f"{text} and {blank} blanks" if blank else text


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
