"""Whether what is installed is what was pinned, without a connection: part of `make check`.

Every package of constraints.txt that is installed must have its pinned version, and what packages
ask of one another must hold (`pip check` beside this).
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

PINS = Path(__file__).parents[1] / "constraints.txt"


def differing(pins: str) -> list[str]:
    """Packages with another version than the pinned one; what is not installed is no matter."""
    found = []
    for line in pins.splitlines():
        name, equals, pinned = line.partition("#")[0].strip().partition("==")
        if not equals:
            continue
        try:
            there = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if there.partition("+")[0] != pinned:
            found.append(f"{name} is {there}, pinned {pinned}")
    return found


if __name__ == "__main__":
    wrong = differing(PINS.read_text(encoding="utf-8"))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))
