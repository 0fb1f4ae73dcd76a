"""Lift over layers: how much more attention a class gets than an even spread would give it.

Drawn from `mass` and `uniform`. This module must not know how a mass is measured.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from attnscope.figures.assemble import assemble
from attnscope.figures.caption import caption, heads_said, layers_said, prompts_said
from attnscope.figures.choice import Choice, heads_way, rows
from attnscope.figures.classes import NEEDS, classes, of_classes
from attnscope.figures.describe import Words
from attnscope.figures.figure import Figure, Run
from attnscope.figures.layout import label_of
from attnscope.figures.numbers import shown
from attnscope.figures.style import Style
from attnscope.figures.theme import PUBLISHED, Theme
from attnscope.figures.words import join, number

__all__ = ["draw", "lift"]

Y_TITLE = "Lift (1: no preference)"


def lift(
    frame: pl.DataFrame, *, theme: Theme = PUBLISHED, width: float = 780, height: float = 260
) -> Any:
    """The chart of `frame`: a panel per `model`, `value` (lift) over `layer` for each `class`."""
    return classes(frame, y_title=Y_TITLE, rule=1.0, theme=theme, width=width, height=height)


def draw(run: Run, choice: Choice, style: Style, *, combine: str | None = None) -> Figure:
    """The figure of a run."""
    heads = heads_way(run, combine)
    found = rows(run, choice, ["mass"], NEEDS, base_only=True, fold=True)
    _, frame, paired = of_classes(found, heads, "lift")
    frame = shown(frame)
    interval = frame["low"].null_count() < frame.height
    said = caption(
        run,
        [
            f"{join(found.sources)}, {layers_said(found.layers)}, "
            + heads_said(run, heads, found.frame, found.sources),
            "Lift: the mass of a class divided by its mass if every query spread its attention "
            f"evenly over the keys it sees; queries: {found.queries}; keys: {found.keys}; "
            f"class set: {found.classes}; condition: {', '.join(found.conditions)}",
            prompts_said(frame["n"].to_list(), interval=interval)
            + (", drawn as bands" if interval else ""),
            f"No text has a token of {join(found.absent, 'or')}" if found.absent else "",
            f"{found.not_numbers} undefined values are left out" if found.not_numbers else "",
        ],
        found.sources,
    )
    words = Words(
        title=style.title or "Lift of every class of tokens, layer by layer",
        overview="A line per class, its 95 % interval as a band, and a dashed line at 1, which is "
        f"no preference; a panel per model: {', '.join(found.models)}.",
        axes=["x: layer, from 0", f"y: lift, up to {number(frame['value'].max())}"],
        legend=[
            f"{label_of(c)}: {colour}"
            for c, colour in zip(found.items, style.theme.class_colours(found.items), strict=True)
        ],
        value="value",
        quantity="lift",
        places={"model": "{}", "layer": "layer {}", "class": "{}"},
        order="class",
        split=["model"],
        notes=_against_one(frame),
        no_differences="One model only: there is nothing to compare with.",
    )
    width = style.width or {1: 480, 2: 700}.get(len(found.models), 800)
    return assemble(
        "lift",
        lambda: lift(frame, theme=style.theme, width=width, height=style.height or 260),
        frame,
        words,
        caption=said,
        style=style,
        width=width + 50,
        differences=paired,
    )


def _against_one(frame: pl.DataFrame) -> list[str]:
    """How many intervals leave out 1, on which side."""
    tested = frame.filter(pl.col("low").is_not_null())
    if tested.is_empty():
        return ["No intervals, so nothing is said about preference."]
    above = tested.filter(pl.col("low") > 1).height
    below = tested.filter(pl.col("high") < 1).height
    return [
        f"Of {tested.height} lifts with an interval, {above} lie wholly above 1 and {below} wholly "
        f"below; {tested.height - above - below} do not differ from no preference."
    ]
