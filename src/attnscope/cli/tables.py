"""How results are printed: tables for people, JSON for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def plain_table(title: str, *columns: str, caption: str | None = None) -> Table:
    """A table without lines but the one under its head."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    return Table(
        *columns,
        title=escape(title),
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )


def without_control(text: str) -> str:
    """Lines with what would move the cursor or change colours written out."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def print_json(content: Any) -> None:
    """For programs to read."""
    from json import dumps

    print(dumps(content, indent=1, ensure_ascii=False))
