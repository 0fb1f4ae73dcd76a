"""What was tried and what came of it: one line each in results.json, and the table in the docs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

__all__ = ["keep", "write_table"]

HERE = Path(__file__).parent
KEPT = HERE / "results.json"
PAGE = HERE.parents[1] / "docs" / "reliability.md"
BEGIN, END = "<!-- made by `make faults` -->", "<!-- end -->"


def keep(what: str, tried: int, result: str, seconds: float) -> None:
    """Remember a line. It takes the place of the one before about the same thing; with FAULTS_ADD
    set, what was tried is added to that, where the outcome was the same."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    before = kept.get(what)
    if before and before["result"] == result and os.environ.get("FAULTS_ADD"):
        tried, seconds = tried + before["tried"], seconds + before["seconds"]
    kept[what] = {"tried": tried, "result": result, "seconds": round(seconds, 1)}
    KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{what}: {tried:,} · {result} · {seconds:.0f} s", flush=True)


def write_table() -> None:
    """The table of docs/reliability.md: a row for each outcome."""
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    rows: dict[str, list[str]] = {}
    for what, one in kept.items():
        rows.setdefault(one["result"], []).append(f"{what}: {one['tried']:,}")
    fuzzed = sum(one["tried"] for what, one in kept.items() if what.startswith("fuzzing: "))
    table = ["| what, how often | outcome |", "| --- | --- |"]
    for outcome, tried in rows.items():
        named = "; ".join(tried)
        if named.startswith("fuzzing: "):
            named = f"fuzzing of {len(tried)} kinds of input: {fuzzed:,}"
        table.append(f"| {named} | {outcome} |")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page = before + BEGIN + "\n" + "\n".join(table) + "\n" + END + after
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write_table()
    sys.exit(0)
