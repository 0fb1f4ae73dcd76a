"""Tables that benchmarks make, put into the page between their marks."""

from collections.abc import Sequence
from pathlib import Path

STATISTICS = Path(__file__).parents[1] / "docs" / "statistics.md"


def put(name: str, lines: Sequence[str], page: Path = STATISTICS) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- end of NAME -->`."""
    text = page.read_text(encoding="utf-8")
    before, mark, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not mark or not end:
        raise SystemExit(f"{page} has no place for {name!r}")
    page.write_text(before + mark + "\n".join(lines) + "\n" + end + after, encoding="utf-8")
    print(f"{page}: {name}")
