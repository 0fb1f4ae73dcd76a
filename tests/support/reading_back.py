"""Read figures back: the rows that a chart embeds, the tables and statements of a description."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

import polars as pl


def plain(markdown: str) -> str:
    """A line of our Markdown as plain text."""
    return html.unescape(re.sub(r"\\(.)", r"\1", markdown).replace("**", ""))


def rows_of(spec: Mapping[str, Any]) -> pl.DataFrame:
    """Every row that a specification embeds."""
    rows = [row for rows in spec["datasets"].values() for row in rows if row]
    return pl.DataFrame(rows, infer_schema_length=None)


def section(description: str, name: str) -> list[str]:
    """The lines of a section."""
    found = re.search(rf"^### {name}\n(.*?)(?=\n\n### |\Z)", description, re.S | re.M)
    return found.group(1).splitlines() if found else []


def table_of(description: str) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the table of every value, as plain text."""
    return table_in(section(description, "Every value"))


def table_in(lines: list[str]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the table among the lines of a section, as plain text."""
    rows = [line for line in lines if line.startswith("|")]
    cells = [
        [plain(c[1:-1]) for c in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in (rows[0], *rows[2:])
    ]
    return cells[0], cells[1:]
