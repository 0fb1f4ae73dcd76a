"""Tables that benchmarks make, put into the page between their marks; and what they are made of,
counted by seed, so that a long simulation may be run in parts: the page is made of all parts."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

STATISTICS = Path(__file__).parents[1] / "docs" / "statistics.md"
COUNTS = Path(__file__).with_name("counts.json")


def put(name: str, lines: Sequence[str], page: Path = STATISTICS) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- end of NAME -->`."""
    text = page.read_text(encoding="utf-8")
    before, mark, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not mark or not end:
        raise SystemExit(f"{page} has no place for {name!r}")
    page.write_text(before + mark + "\n".join(lines) + "\n" + end + after, encoding="utf-8")
    print(f"{page}: {name}")


def _written(whole: Any, depth: int = 3) -> str:
    """JSON with a line for every row, and not one for every number."""
    if not depth:
        return json.dumps(whole)
    rows = [
        f"{json.dumps(k, ensure_ascii=False)}: {_written(v, depth - 1)}" for k, v in whole.items()
    ]
    return "{\n" + ",\n".join(rows) + "\n}"


class Counts:
    """What a table is made of: of every row and column the number of sets, their sum and their
    sum of squares, by seed. A seed that is run again replaces what it gave before."""

    def __init__(self, table: str, file: Path = COUNTS):
        self.table, self.file = table, file
        whole = json.loads(file.read_text()) if file.is_file() else {}
        self.seeds: dict[str, dict[str, list[float]]] = whole.get(table, {})

    def keep(self, seed: int, found: Iterable[tuple[str, str, Any]]) -> None:
        """Counts of one seed: row, column, and a value for each set, nan where there is none."""
        mine: dict[str, list[float]] = {}
        for row, column, values in found:
            x = np.asarray(values, dtype=float).reshape(-1)
            x = x[~np.isnan(x)]
            old = mine.get(f"{row} | {column}", [0, 0.0, 0.0])
            new = [len(x), float(x.sum()), float((x**2).sum())]
            mine[f"{row} | {column}"] = [a + b for a, b in zip(old, new, strict=True)]
        self.seeds[str(seed)] = mine
        whole = json.loads(self.file.read_text()) if self.file.is_file() else {}
        whole[self.table] = dict(sorted(self.seeds.items()))
        self.file.write_text(_written(whole) + "\n", encoding="utf-8")

    def all(self, row: str, column: str) -> tuple[int, float, float]:
        """Over all seeds: the number of sets, their mean in per cent, and its standard error."""
        parts = [of[key] for of in self.seeds.values() if (key := f"{row} | {column}") in of]
        n, total, squares = (sum(part[i] for part in parts) for i in range(3))
        if not n:
            return 0, np.nan, np.nan
        mean = total / n
        spread = max(squares / n - mean**2, 0.0)
        return int(n), 100 * mean, 100 * float(np.sqrt(spread / n))

    @property
    def seeds_text(self) -> str:
        """Which seeds there are."""
        return ", ".join(sorted(self.seeds, key=int))
