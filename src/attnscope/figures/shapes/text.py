"""Text with each token in a box that is shaded by its value."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.shapes.shape import TALLEST, Shape, chart_of, tooltips
from attnscope.figures.text_format import BLANKS
from attnscope.figures.theme import Style, Theme

LINE = 1.9
"""Height of a line, as a multiple of the font size."""
MOST = int(TALLEST / LINE / 11)
"""Largest number of lines that are drawn."""


@dataclass(frozen=True, kw_only=True)
class Text(Shape):
    """Boxes on `line` from `column` to `end`, `shown` in them from `at`, shaded by `value`."""

    y: str = "Attention"

    rank = 7
    drawn = "The tokens of a prompt in reading order, darker the more attention they get"

    @property
    def split(self) -> list[str]:
        return []

    def interval(self, frame: pl.DataFrame) -> str | None:
        return None

    def axes(self, frame: pl.DataFrame) -> list[str]:
        return ["none: the tokens are in the order of the text"]

    def width(self, frame: pl.DataFrame) -> float:
        return 780

    def draw(self, frame: pl.DataFrame, style: Style) -> Any:
        theme = style.theme
        top = frame["value"].max() or 1.0
        assert isinstance(top, float)
        # A square-root scale: with a linear one, a single sink would leave all other tokens blank.
        last = len(theme.sequential) - 1
        scale = alt.Scale(
            domain=[top * (i / last) ** 2 for i in range(last + 1)],
            range=list(theme.sequential),
            interpolate="rgb",
        )
        legend = alt.Legend(orient="top", title=self.y, titleOrient="left", titlePadding=10)
        across = alt.Scale(domain=[0, characters_in(style.width, theme)], nice=False)
        base = chart_of(frame).encode(
            x=alt.X("column:Q", axis=None, scale=across),
            y=alt.Y("line:O", axis=None, scale=alt.Scale(paddingInner=0.12, paddingOuter=0)),
        )
        boxes = base.mark_rect(style="paper-edge", strokeWidth=1).encode(
            x2="end:Q",
            color=alt.Color("value:Q", scale=scale, legend=legend),
            tooltip=tooltips(frame, ["position", "token", "class", "role", "value"]),
        )
        dark = alt.datum.value > top * 0.36
        text: dict[str, Any] = {"font": theme.mono, "fontSize": theme.size, "align": "left"}
        letters = base.mark_text(**text, baseline="middle").encode(
            x=alt.X("at:Q", axis=None),
            text="shown:N",
            color=alt.condition(dark, alt.value("#ffffff"), alt.value("#111111")),
        )
        tall = theme.size * LINE * frame["line"].n_unique()
        return alt.layer(boxes, letters).properties(width=style.width, height=tall)


def characters_in(width: float, theme: Theme) -> int:
    """Number of characters of the fixed-width font per line."""
    return max(20, int(width / (theme.size * 0.603)))


def laid_out(tokens: pl.DataFrame, width: float, theme: Theme) -> pl.DataFrame:
    """Tokens with `shown`, `line`, `column`, `at`, `end`: line by line, broken as the text. Those
    beyond the last line are left out."""
    characters = characters_in(width, theme)
    line = column = 0
    placed = []
    for token in tokens["token"]:
        text = _visible(token or "")
        size = max(1, min(sum(map(_columns, text)), characters))
        if column and column + size > characters:
            line, column = line + 1, 0
        if line == MOST:
            break
        if len(text) > characters:
            text = text[: characters - 1] + "…"
        # Leading blanks are not drawn, so the text starts after them.
        inked = text.lstrip(" ")
        at = column + len(text) - len(inked)
        placed.append((inked.replace(" ", "\u00a0"), line, column, at, column + size))
        column += size
        if token and token.endswith("\n"):
            line, column = line + 1, 0
    schema = {"shown": pl.String} | dict.fromkeys(("line", "column", "at", "end"), pl.Int32)
    boxes = pl.DataFrame(placed, schema=schema, orient="row")
    return pl.concat([tokens.head(len(placed)), boxes], how="horizontal")


def _visible(token: str) -> str:
    """The token with a sign for every invisible character."""
    shown = token.translate(BLANKS)
    signs = ["·" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in shown]
    return "".join(signs) or "∅"


def _columns(character: str) -> int:
    """The columns that a character takes: 0 for an accent, 2 for a wide one."""
    wide = unicodedata.east_asian_width(character) in "FW"
    return 0 if unicodedata.combining(character) else 1 + wide
