"""Tables and our own Markdown as HTML. Everything is escaped here, so nothing is trusted.

This module must not know runs or charts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import polars as pl

from attnscope.figures.words import number, plain

__all__ = ["facts", "frame_table", "markdown_html"]


def frame_table(frame: pl.DataFrame) -> str:
    """A frame as a table that scrolls if it is long."""
    head = "".join(f"<th>{escape(name)}</th>" for name in frame.columns)
    kinds = [dtype.is_numeric() for dtype in frame.dtypes]
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="number">{escape(number(v))}</td>'
            if numeric
            else f"<td>{escape('—' if v is None else str(v))}</td>"
            for v, numeric in zip(row, kinds, strict=True)
        )
        + "</tr>"
        for row in frame.iter_rows()
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def facts(values: Mapping[str, Any]) -> str:
    """Names and values, nested ones in a line."""
    rows = "".join(
        f"<tr><th>{escape(str(k))}</th><td>{escape(_said(v))}</td></tr>" for k, v in values.items()
    )
    return f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'


def _said(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple) and not value:
        return "—"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_said(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_said(v) for v in value)
    return "—" if value is None else str(value)


def _line(text: str) -> str:
    """A line of our Markdown; of its marks only ** is used."""
    bold = re.split(r"(?<!\\)\*\*", text)
    return "".join(
        f"<strong>{escape(plain(part))}</strong>" if i % 2 else escape(plain(part))
        for i, part in enumerate(bold)
    )


def markdown_html(text: str) -> str:
    """The Markdown that descriptions are written in: headings, lists, tables, lines."""
    parts: list[str] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("### "):
            parts.append(f"<h4>{_line(line[4:])}</h4>")
            at += 1
        elif line.startswith(("- ", "| ")):
            block = _block(lines[at:], line[:2])
            at += len(block)
            parts.append(_list(block) if line.startswith("- ") else _table(block))
        else:
            if line.strip():
                parts.append(f"<p>{_line(line)}</p>")
            at += 1
    return "\n".join(parts)


def _block(lines: Sequence[str], mark: str) -> list[str]:
    found = []
    for line in lines:
        if not line.startswith(mark):
            break
        found.append(line)
    return found


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_line(line[2:])}</li>' for line in lines)}</ul>"


def _table(lines: Sequence[str]) -> str:
    rows = [[c.strip(" ") for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    numeric = [rule.endswith(":") for rule in rows[1]]
    head = "".join(f"<th>{_line(c)}</th>" for c in rows[0])
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=number' if right else ''}>{_line(c)}</td>"
            for c, right in zip(row, numeric, strict=True)
        )
        + "</tr>"
        for row in rows[2:]
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )
