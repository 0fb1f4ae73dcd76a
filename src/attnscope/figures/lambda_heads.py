"""λ of every head: by which factor filler scales the attention of the original tokens.

Drawn from `lambda`. This module must not know how a slope is fitted.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.assemble import assemble
from attnscope.figures.caption import caption, layers_said, prompts_said
from attnscope.figures.choice import Choice, rows
from attnscope.figures.describe import Words
from attnscope.figures.figure import Figure, Run
from attnscope.figures.layers import spread
from attnscope.figures.layout import columns_for, panel_title, tips
from attnscope.figures.matrix import matrices
from attnscope.figures.numbers import means, rank, shown
from attnscope.figures.style import Style
from attnscope.figures.theme import PUBLISHED, Theme
from attnscope.figures.words import join

__all__ = ["NEEDS", "draw", "lambda_heads"]

NEEDS = (
    "an experiment with `lambda` among its measures and a condition that inserts filler has it, "
    "such as the recipe filler-profile"
)
DOTS = 96
"""The most heads of a panel that are drawn as dots with whiskers; more become a matrix."""


def lambda_heads(
    frame: pl.DataFrame, *, theme: Theme = PUBLISHED, width: float = 780, height: float = 230
) -> Any:
    """The chart of `frame`: λ (`value`) with its interval per `layer` and `head`, a panel each.

    Columns: `panel`, `layer`, `head`, `value`, `low`, `high`, `differs`. More than 96 heads in a
    panel become a matrix, with a dot where the interval leaves out 1.
    """
    names = frame["panel"].unique(maintain_order=True).to_list()
    if max(part.height for part in frame.partition_by("panel")) > DOTS:
        far = max((abs(v - 1) for v in frame["value"].drop_nulls()), default=0.0) or 1.0
        return matrices(
            frame,
            x="head",
            y="layer",
            panel="panel",
            x_order=frame["head"].unique().sort().to_list(),
            y_order=frame["layer"].unique().sort().to_list(),
            x_title="Head",
            y_title="Layer",
            value="value",
            value_title="λ (1: unchanged)",
            domain=[1 - far, 1 - far / 2, 1, 1 + far / 2, 1 + far],
            colours=theme.diverging,
            theme=theme,
            width=width,
            marked="differs",
        )
    columns = columns_for(len(names), 3)
    wide = width / columns - (20 if columns > 1 else 0)
    layers = frame["layer"].unique().to_list()
    one = layers[0] if len(layers) == 1 else None
    panels = []
    for i, name in enumerate(names):
        part = frame.filter(pl.col("panel") == name)
        flat = alt.Axis(labelAngle=0)
        if one is None:
            base = alt.Chart(part).encode(
                x=alt.X("layer:O", title="Layer (heads side by side)", axis=flat),
                xOffset=alt.XOffset("head:O"),
            )
        else:
            base = alt.Chart(part).encode(
                x=alt.X("head:O", title=f"Head of layer {one}", axis=flat)
            )
        said = "λ (1: unchanged)" if i % columns == 0 else ""
        y = alt.Y(
            "value:Q",
            title=said,
            axis=alt.Axis(grid=True),
            scale=alt.Scale(domain=spread(frame, 1.0), nice=True, zero=False),
        )
        marks: list[Any] = [
            alt.Chart(alt.InlineData(values=[{}]))
            .mark_rule(style="faint-rule", strokeDash=[5, 3])
            .encode(y=alt.YDatum(1.0))
        ]
        if part["low"].null_count() < part.height:
            marks.append(
                base.mark_rule(strokeWidth=1.2, color=theme.filled).encode(
                    y=alt.Y("low:Q", title=said), y2="high:Q"
                )
            )
        marks.append(
            base.mark_point(filled=True, size=26, opacity=1, color=theme.filled).encode(
                y=y,
                tooltip=tips(part, ["panel", "layer", "head", "value", "low", "high", "n"]),
            )
        )
        if len(names) > 1:
            marks.append(panel_title([name], wide, theme))
        panels.append(alt.layer(*marks).properties(width=wide, height=height))
    return alt.concat(*panels, columns=columns, spacing={"row": 26, "column": 26})


def draw(run: Run, choice: Choice, style: Style) -> Figure:
    """The figure of a run: a panel per model and condition."""
    found = rows(run, choice, ["lambda"], NEEDS)
    values = found.frame
    frame = means(values, ["model", "condition", "layer", "head"]).sort(
        rank("model", found.models), rank("condition", found.conditions), "layer", "head"
    )
    several = len(found.conditions) > 1
    panel = pl.format("{}, {}", "model", "condition") if several else pl.col("model")
    frame = shown(
        frame.select(
            panel.alias("panel"),
            "model",
            "condition",
            "layer",
            "head",
            "value",
            "low",
            "high",
            "n",
            ((pl.col("low") > 1) | (pl.col("high") < 1)).fill_null(False).alias("differs"),
        )
    )
    interval = frame["low"].null_count() < frame.height
    said = caption(
        run,
        [
            f"{join(found.models)}, {layers_said(found.layers)}, every head by itself",
            "λ: slope through the origin of the average attention weight with filler on that "
            f"without, over aligned tokens; queries: {found.queries}; keys: {found.keys}; "
            f"not normalised further; {join(found.conditions)} against the base",
            prompts_said(frame["n"].to_list(), interval=interval),
            f"{found.not_numbers} undefined values are left out" if found.not_numbers else "",
        ],
        found.models,
    )
    words = Words(
        title=style.title or "λ of every head",
        overview="λ per layer and head, its 95 % interval beside it, against 1, which is no "
        f"change; {len(_names(frame))} panels: {', '.join(_names(frame))}.",
        axes=["x: layer and head, from 0", "y: λ (in a matrix: colour)"],
        legend=["dashed line: λ = 1, attention unchanged by filler"],
        value="value",
        quantity="λ",
        places={"panel": "{}", "layer": "layer {}", "head": "head {}"},
        split=["panel"],
        notes=_against_one(frame),
        no_differences="λ compares two conditions already: 1 is no difference (see Notes).",
    )
    names = len(_names(frame))
    width = style.width or (560 if names == 1 else 780)
    return assemble(
        "lambda",
        lambda: lambda_heads(frame, theme=style.theme, width=width, height=style.height or 230),
        frame,
        words,
        caption=said,
        style=style,
        width=width + 50,
    )


def _names(frame: pl.DataFrame) -> list[str]:
    return frame["panel"].unique(maintain_order=True).to_list()


def _against_one(frame: pl.DataFrame) -> list[str]:
    lines = []
    for part in frame.partition_by("panel", maintain_order=True):
        name = str(part.row(0, named=True)["panel"])
        tested = part.filter(pl.col("low").is_not_null())
        if tested.is_empty():
            lines.append(f"{name}: no intervals, so nothing is said about change.")
            continue
        below = tested.filter(pl.col("high") < 1).height
        above = tested.filter(pl.col("low") > 1).height
        lines.append(
            f"{name}: of {tested.height} heads, attention falls in {below} (interval below 1), "
            f"rises in {above} (above 1), and is undetermined in {tested.height - below - above}."
        )
    return lines
