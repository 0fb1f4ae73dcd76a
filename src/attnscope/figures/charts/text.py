"""Draws text with each token in a box that is shaded by its value."""

import unicodedata
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.charts.common import tooltips
from attnscope.figures.theme import Style, Theme

WIDTHS = {"F": 2, "W": 2}
VISIBLE = {"\n": "⏎", "\r": "␍", "\t": "⇥"}


def shaded_text(frame: pl.DataFrame, style: Style, *, value_title: str = "Attention") -> Any:
    """Boxes on `line` from `column` to `end`, `shown` in them from `at`, shaded by `value`.

    Columns: these, and `position`, `token`, `class`, `role` for the tooltip.
    """
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
    legend = alt.Legend(orient="top", title=value_title, titleOrient="left", titlePadding=10)
    across = alt.Scale(domain=[0, characters_in(style.width, theme)], nice=False)
    base = alt.Chart(frame).encode(
        x=alt.X("column:Q", axis=None, scale=across),
        y=alt.Y("line:O", axis=None, scale=alt.Scale(paddingInner=0.12, paddingOuter=0)),
    )
    boxes = base.mark_rect(style="paper-edge", strokeWidth=1).encode(
        x2="end:Q",
        color=alt.Color("value:Q", scale=scale, legend=legend),
        tooltip=tooltips(frame, ["position", "token", "class", "role", "value"]),
    )
    middle = top * 0.36
    letters = [
        base.transform_filter(keep)
        .mark_text(
            font=theme.mono, fontSize=theme.size, align="left", baseline="middle", color=colour
        )
        .encode(x=alt.X("at:Q", axis=None), text="shown:N")
        for keep, colour in (
            (alt.datum.value > middle, "#ffffff"),
            ((alt.datum.value <= middle) | (alt.datum.value == None), "#111111"),  # noqa: E711
        )
    ]
    tall = theme.size * 1.9 * frame["line"].n_unique()
    return alt.layer(boxes, *letters).properties(width=style.width, height=tall)


def characters_in(width: float, theme: Theme) -> int:
    """Number of characters of the fixed-width font per line."""
    return max(20, int(width / (theme.size * 0.603)))


def laid_out(tokens: pl.DataFrame, width: float, theme: Theme) -> pl.DataFrame:
    """Tokens with `shown`, `line`, `column`, `at`, `end`: line by line, broken as the text."""
    characters = characters_in(width, theme)
    line = column = 0
    placed = []
    for token in tokens["token"]:
        visible = "".join(
            VISIBLE.get(c, "·" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c)
            for c in token or ""
        )
        visible = visible or "∅"
        size = min(
            sum(
                0 if unicodedata.combining(c) else WIDTHS.get(unicodedata.east_asian_width(c), 1)
                for c in visible
            ),
            characters,
        )
        if column and column + size > characters:
            line, column = line + 1, 0
        if len(visible) > characters:
            visible = visible[: characters - 1] + "…"
        # Leading blanks are not drawn, so the text starts after them.
        inked = visible.lstrip(" ")
        at = column + len(visible) - len(inked)
        inked = inked.replace(" ", "\u00a0")
        placed.append((inked, line, column, at, column + max(size, 1)))
        column += max(size, 1)
        if token and token.endswith("\n"):
            line, column = line + 1, 0
    schema = {
        "shown": pl.String,
        "line": pl.Int32,
        "column": pl.Int32,
        "at": pl.Int32,
        "end": pl.Int32,
    }
    return pl.concat([tokens, pl.DataFrame(placed, schema=schema, orient="row")], how="horizontal")
