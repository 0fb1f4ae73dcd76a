"""Writes descriptions as Markdown and as HTML from the same blocks: lines, lists and tables.

All text is escaped here, because names and tokens may contain anything.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import polars as pl

from attnscope.figures.text_format import inline, visible


class Strong(str):
    """Bold text."""


TextLine = str | tuple[str, ...]
"""A line: plain text, or pieces of it, some of them `Strong`."""


@dataclass(frozen=True)
class Lines:
    """Sentences, one per line."""

    lines: Sequence[TextLine]


@dataclass(frozen=True)
class Items:
    """A list and the line before it."""

    items: Sequence[TextLine]
    lead: TextLine | None = None


Block = Lines | Items | pl.DataFrame


@dataclass(frozen=True)
class Section:
    """A part of a description under its heading."""

    title: str
    blocks: Sequence[Block]


def as_markdown(sections: Sequence[Section]) -> str:
    """A description as Markdown."""

    def line(text: TextLine) -> str:
        pieces = (text,) if isinstance(text, str) else text
        return "".join(f"**{inline(p)}**" if isinstance(p, Strong) else inline(p) for p in pieces)

    def block(content: Block) -> str:
        if isinstance(content, pl.DataFrame):
            return _markdown_table(content)
        if isinstance(content, Lines):
            return "\n".join(map(line, content.lines))
        lead = [] if content.lead is None else [line(content.lead)]
        return "\n".join([*lead, *(f"- {line(item)}" for item in content.items)])

    return "\n\n".join(
        f"### {inline(section.title)}\n" + "\n\n".join(map(block, section.blocks))
        for section in sections
    )


def as_html(sections: Sequence[Section]) -> str:
    """A description as HTML."""

    def line(text: TextLine) -> str:
        pieces = (text,) if isinstance(text, str) else text
        return "".join(
            f"<strong>{escape(visible(p))}</strong>"
            if isinstance(p, Strong)
            else escape(visible(p))
            for p in pieces
        )

    def block(content: Block) -> list[str]:
        if isinstance(content, pl.DataFrame):
            return [html_table(content)]
        if isinstance(content, Lines):
            return [f"<p>{line(text)}</p>" for text in content.lines]
        lead = [] if content.lead is None else [f"<p>{line(content.lead)}</p>"]
        return [*lead, f"<ul>{''.join(f'<li>{line(item)}</li>' for item in content.items)}</ul>"]

    parts: list[str] = []
    for section in sections:
        parts.append(f"<h4>{line(section.title)}</h4>")
        for content in section.blocks:
            parts += block(content)
    return "\n".join(parts)


def html_table(frame: pl.DataFrame, *, css_class: str = "") -> str:
    """A frame as a scrollable HTML table; `css_class` selects its style and scripts."""
    attributes = [' class="number"' if dtype.is_numeric() else "" for dtype in frame.dtypes]

    def cells(tag: str, values: Iterable[Any]) -> str:
        both = zip(attributes, values, strict=True)
        return "".join(f"<{tag}{of}>{escape(visible(value))}</{tag}>" for of, value in both)

    head = cells("th", frame.columns)
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in frame.iter_rows())
    opening = f'<table class="{css_class}">' if css_class else "<table>"
    return (
        f'<div class="scroll">{opening}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _markdown_table(frame: pl.DataFrame) -> str:
    head = f"| {' | '.join(map(inline, frame.columns))} |"
    rule = "| " + " | ".join("---:" if t.is_numeric() else "---" for t in frame.dtypes) + " |"
    body = ["| " + " | ".join(map(inline, row)) + " |" for row in frame.iter_rows()]
    return "\n".join([head, rule, *body])


def html_properties(values: Mapping[str, Any]) -> str:
    """Names and values as an HTML table; nested values are written in one line."""
    rows = "".join(
        f"<tr><th>{escape(str(k))}</th><td>{escape(_value_text(v))}</td></tr>"
        for k, v in values.items()
    )
    return f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple) and not value:
        return "—"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_value_text(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_value_text(v) for v in value)
    return "—" if value is None else str(value)
