"""Puts a table into a page of the documentation, between its two marks."""

from collections.abc import Sequence
from pathlib import Path


def put(name: str, lines: Sequence[str], page: Path) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- end of NAME -->`."""
    text = page.read_text(encoding="utf-8")
    before, mark, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not mark or not end:
        raise SystemExit(f"{page} has no place for {name!r}")
    page.write_text(before + mark + "\n".join(lines) + "\n" + end + after, encoding="utf-8")
    print(f"{page}: {name}")
