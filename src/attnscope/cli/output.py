"""Print results as tables or as JSON."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def plain_table(title: str, *columns: str, caption: str | None = None) -> Table:
    """A table with one line, under its header."""
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
    """The text with control characters escaped; a terminal would execute them."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def print_json(content: Any) -> None:
    """Print a value as JSON. Numbers that JSON does not have (infinity, nan) become null."""
    from json import dumps

    print(dumps(_finite(content), indent=1, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
