"""The text itself, every token shaded by the attention it receives.

Drawn from `positions` and `tokens`. This module must not know how attention is measured.
"""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from typing import Any

import altair as alt
import polars as pl

from attnscope.errors import InputError, unknown
from attnscope.figures.assemble import assemble
from attnscope.figures.caption import caption, pairs_said
from attnscope.figures.choice import Choice, profiles
from attnscope.figures.describe import Words
from attnscope.figures.figure import Figure, Run
from attnscope.figures.layout import tips
from attnscope.figures.numbers import shown
from attnscope.figures.style import Style
from attnscope.figures.theme import PUBLISHED, Theme

__all__ = ["NEEDS", "draw", "text"]

NEEDS = (
    "an experiment with `profile` among its measures has them, such as the recipe filler-profile"
)
BY = {
    "average": "Average attention weight: mean over the later queries that see the token",
    "received": "Attention received: sum over queries",
}
MOST = 1_200
"""The most tokens that are drawn."""
WIDTHS = {"F": 2, "W": 2}
VISIBLE = {"\n": "⏎", "\r": "␍", "\t": "⇥"}


def text(
    frame: pl.DataFrame,
    *,
    theme: Theme = PUBLISHED,
    value_title: str = "Attention",
    width: float = 780,
) -> Any:
    """The chart of `frame`: boxes on `line` from `column` to `end`, `shown` in them from `at`."""
    characters = characters_in(width, theme)
    top = frame["value"].max() or 1.0
    assert isinstance(top, float)
    # Steps of the square root: a single sink would leave the rest of a linear scale blank.
    last = len(theme.sequential) - 1
    scale = alt.Scale(
        domain=[top * (i / last) ** 2 for i in range(last + 1)],
        range=list(theme.sequential),
        interpolate="rgb",
    )
    lines = frame["line"].n_unique()
    tall = theme.size * 1.9
    x = alt.X("column:Q", axis=None, scale=alt.Scale(domain=[0, characters], nice=False))
    y = alt.Y("line:O", axis=None, scale=alt.Scale(paddingInner=0.12, paddingOuter=0))
    base = alt.Chart(frame).encode(x=x, y=y)
    boxes = base.mark_rect(style="paper-edge", strokeWidth=1).encode(
        x2="end:Q",
        color=alt.Color(
            "value:Q",
            scale=scale,
            legend=alt.Legend(orient="top", title=value_title, titleOrient="left", titlePadding=10),
        ),
        tooltip=tips(frame, ["position", "token", "class", "role", "value"]),
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
    return alt.layer(boxes, *letters).properties(width=width, height=tall * lines)


def characters_in(width: float, theme: Theme) -> int:
    """How many characters of the fixed-width font fit."""
    return max(20, int(width / (theme.size * 0.603)))


def laid_out(tokens: pl.DataFrame, characters: int) -> pl.DataFrame:
    """Tokens with `shown`, `line`, `column`, `at`, `end`: line by line, broken as the text."""
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
        # Blanks in front would not be drawn, so the letters begin after them.
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


def draw(
    run: Run,
    choice: Choice,
    style: Style,
    *,
    by: str = "average",
    leave_out_first: bool = False,
) -> Figure:
    """The figure of one prompt of a run: the first model, layer and head, unless told."""
    if by not in BY:
        raise unknown("quantity to shade by", by, BY)
    found, queries, total = profiles(run, choice, NEEDS, panels=1)
    first = found.row(0, named=True)
    place = ["model", "layer", "head", "prompt", "condition"]
    found = found.filter([pl.col(c) == first[c] for c in place])
    known = (
        run.tokens.filter([pl.col(c) == first[c] for c in ("model", "prompt", "condition")])
        .select("position", pl.col("text").alias("token"), "class", "role")
        .collect()
    )
    full = (
        found.select("position", pl.col(by).alias("value"))
        .join(known, on="position", how="left")
        .sort("position")
    )
    if leave_out_first:
        full = full.filter(pl.col("position") > 0)
    if full["value"].drop_nulls().is_empty():
        raise InputError(f"no token of this prompt has a defined {by}: there is nothing to shade")
    width = style.width or 780
    cut = full.head(MOST)
    frame = shown(laid_out(cut, characters_in(width, style.theme)))
    columns = [
        "position",
        "token",
        "class",
        "role",
        "value",
        "shown",
        "line",
        "column",
        "at",
        "end",
    ]
    frame = frame.select(columns)
    pair = found.select("model", "layer", "head").head(1)
    said = caption(
        run,
        [
            pairs_said(pair),
            f"{BY[by]}; queries: {queries}; not normalised further; condition: "
            f"{first['condition']}",
            f"n = 1: prompt {first['prompt']}",
            f"1 of {total} heads in the run is shown" if total > 1 else "",
            "First token left out" if leave_out_first else "",
            f"The first {MOST:,} of {full.height:,} tokens" if full.height > MOST else "",
            "Shades go by the square root",
        ],
        [first["model"]],
    )
    words = Words(
        title=style.title or "The text, shaded by attention",
        overview=f"The {frame.height} tokens of a prompt in reading order, each on a background "
        "that is darker the more attention it gets.",
        axes=["none: tokens stand as in the text"],
        legend=[
            f"shade: from {style.theme.sequential[0]} (0) to {style.theme.sequential[-1]} (most)",
            "⏎: line break; ⇥: tab; ·: a character that cannot be seen",
        ],
        value="value",
        quantity=by,
        places={"position": "position {}", "token": "token “{}”"},
        notes=_top(frame),
        no_differences="One prompt: nothing is compared.",
    )

    def chart() -> Any:
        return text(frame, theme=style.theme, value_title=BY[by].split(":")[0], width=width)

    return assemble("text", chart, frame, words, caption=said, style=replace(style), width=width)


def _top(frame: pl.DataFrame) -> list[str]:
    """How much the most attended tokens have of the whole."""
    known = sorted(frame["value"].drop_nulls().to_list(), reverse=True)
    tenth = max(1, len(known) // 10)
    whole = sum(known)
    if not whole:
        return []
    return [
        f"The {tenth} most attended of {len(known)} tokens have "
        f"{sum(known[:tenth]) / whole:.1%} of the sum of all."
    ]
