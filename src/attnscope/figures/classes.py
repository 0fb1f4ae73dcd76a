"""The mass of every class over all layers, as lines or as a stacked area.

Drawn from `mass`. This module must not know how a mass is measured.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import polars as pl

from attnscope.errors import unknown
from attnscope.figures.assemble import assemble
from attnscope.figures.caption import caption, heads_said, layers_said, prompts_said
from attnscope.figures.choice import Choice, Rows, heads_way, rows
from attnscope.figures.describe import Words
from attnscope.figures.figure import Figure, Run
from attnscope.figures.layers import layer_areas, layer_lines
from attnscope.figures.layout import label_of
from attnscope.figures.numbers import differences, means, rank, shown
from attnscope.figures.style import Style
from attnscope.figures.theme import PUBLISHED, Theme
from attnscope.figures.words import join, number
from attnscope.stats.tables import combine, normalise

__all__ = ["NEEDS", "classes", "draw", "of_classes"]

NEEDS = "an experiment with `mass` among its measures has it, such as the recipe token-types"
FORMS = ("lines", "area")
Y_TITLE = "Attention mass"


def classes(
    frame: pl.DataFrame,
    *,
    form: str = "lines",
    y_title: str = Y_TITLE,
    rule: float | None = None,
    theme: Theme = PUBLISHED,
    width: float = 780,
    height: float = 260,
) -> Any:
    """The chart of `frame`: a panel per `model`, `value` over `layer` for each `class`.

    Columns: `model`, `layer`, `class`, `value`, `low`, `high`, and for areas `bottom`, `top`.
    """
    names = frame["class"].unique(maintain_order=True).to_list()
    colours = dict(zip(names, theme.class_colours(names), strict=True))
    titles = dict.fromkeys(frame["model"].unique(maintain_order=True), y_title)
    shared: dict[str, Any] = {
        "series": "class",
        "panel": "model",
        "y_titles": titles,
        "theme": theme,
        "width": width,
        "height": height,
    }
    if form == "area":
        return layer_areas(frame, colours, **shared)
    return layer_lines(frame, colours, rule=rule, **shared)


def of_classes(
    found: Rows, heads: str, how: str
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame | None]:
    """Per prompt; as shown; and the differences between models."""
    values = normalise(combine(found.frame, heads), how)
    frame = means(values, ["model", "layer", "item"]).rename({"item": "class"})
    order = [rank("model", found.models), rank("class", found.items), rank("layer", found.layers)]
    pairs = [(b, a) for a, b in combinations(found.models, 2)]
    paired = None
    if pairs:
        paired = differences(values, "model", pairs, ["layer", "item"]).rename({"item": "class"})
        paired = paired.sort(order[2], order[1], maintain_order=True)
    return values, frame.sort(order), paired


def draw(
    run: Run, choice: Choice, style: Style, *, form: str = "lines", combine: str | None = None
) -> Figure:
    """The figure of a run, as "lines" with their intervals or as an "area"."""
    if form not in FORMS:
        raise unknown("form", form, FORMS)
    heads = heads_way(run, combine)
    found = rows(run, choice, ["mass"], NEEDS, base_only=True, fold=True)
    _, frame, paired = of_classes(found, heads, "mass")
    if form == "area":
        # The first class of the legend stands on top.
        top = pl.col("value").cum_sum(reverse=True).over("model", "layer")
        frame = frame.with_columns(top.alias("top")).with_columns(
            (pl.col("top") - pl.col("value")).alias("bottom")
        )
    frame = shown(frame)
    interval = form == "lines" and frame["low"].null_count() < frame.height
    said = caption(
        run,
        [
            f"{join(found.sources)}, {layers_said(found.layers)}, "
            + heads_said(run, heads, found.frame, found.sources),
            "Attention summed over the keys of a class, mean over queries (mass); "
            f"queries: {found.queries}; keys: {found.keys}; class set: {found.classes}; "
            f"condition: {', '.join(found.conditions)}",
            prompts_said(frame["n"].to_list(), interval=interval)
            + (", drawn as bands" if interval else ""),
            f"No text has a token of {join(found.absent, 'or')}" if found.absent else "",
            f"{found.not_numbers} undefined values are left out" if found.not_numbers else "",
        ],
        found.sources,
    )
    what = "A line per class, its 95 % interval as a band" if form == "lines" else "Stacked areas"
    words = Words(
        title=style.title or "Attention to every class of tokens, layer by layer",
        overview=f"{what}, over {len(found.layers)} layers; a panel per model: "
        f"{', '.join(found.models)}.",
        axes=["x: layer, from 0", f"y: {Y_TITLE}, up to {number(frame['value'].max())}"],
        legend=[
            f"{label_of(c)}: {colour}"
            for c, colour in zip(found.items, style.theme.class_colours(found.items), strict=True)
        ],
        value="value",
        quantity="mass",
        places={"model": "{}", "layer": "layer {}", "class": "{}"},
        order="class",
        split=["model"],
        no_differences="One model only: there is nothing to compare with.",
    )
    width = style.width or _width(found)

    def chart() -> Any:
        return classes(frame, form=form, theme=style.theme, width=width, height=style.height or 260)

    return assemble(
        "classes",
        chart,
        frame,
        words,
        caption=said,
        style=style,
        width=width + 50,
        differences=paired,
    )


def _width(found: Rows) -> float:
    return {1: 480, 2: 700}.get(len(found.models), 800)
