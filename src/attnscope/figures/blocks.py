"""Blocks of a description, and their Markdown: lines, lists and tables.

`templates/blocks.html` writes the same blocks as HTML. All text is escaped, because names and
tokens may contain anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from attnscope.figures.text_format import inline


@dataclass(frozen=True)
class Items:
    """A list and the line before it."""

    items: Sequence[str]
    lead: str = ""


Block = str | Items | pl.DataFrame
"""A line, a list or a table."""


@dataclass(frozen=True)
class Section:
    """A part of a description under its heading."""

    title: str
    blocks: Sequence[Block]


def as_markdown(sections: Sequence[Section]) -> str:
    """A description as Markdown."""

    def lines(block: Block) -> list[str]:
        if isinstance(block, pl.DataFrame):
            return ["", *_table(block)]
        if isinstance(block, str):
            return [inline(block)]
        lead = ["", inline(block.lead), ""] if block.lead else []
        return [*lead, *(f"- {inline(item)}" for item in block.items)]

    parts = [
        "\n".join([f"### {inline(s.title)}", *(line for b in s.blocks for line in lines(b))])
        for s in sections
    ]
    return "\n\n".join(parts)


def _table(frame: pl.DataFrame) -> list[str]:
    head = f"| {' | '.join(map(inline, frame.columns))} |"
    rule = "| " + " | ".join("---:" if t.is_numeric() else "---" for t in frame.dtypes) + " |"
    return [
        head,
        rule,
        *("| " + " | ".join(map(inline, row)) + " |" for row in frame.iter_rows()),
    ]
