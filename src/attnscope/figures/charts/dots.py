"""Draws heads as dots with intervals: by layer, or in the order of their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.charts.common import empty_row, panels, rule_at, tooltips, value_range
from attnscope.figures.theme import Style

NAMED = 5
"""Number of heads of a strip that are named."""
FEW = 96
"""Largest number of heads of a strip that are drawn with intervals."""
MANY = 300
"""Largest number of heads of a strip whose colour shows the layer. More dots overlap, so a second
panel shows the layers."""


def head_dots(frame: pl.DataFrame, style: Style, *, y_title: str, rule: float) -> Any:
    """`value` with `low` and `high` per `layer` and `head`, a panel per `panel`."""
    layers = frame["layer"].unique().to_list()
    flat = alt.Axis(labelAngle=0)
    colour = style.theme.filled

    def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
        base = alt.Chart(part)
        if len(layers) == 1:
            title = f"Head of layer {layers[0]}"
            base = base.encode(x=alt.X("head:O", title=title, axis=flat))
        else:
            x = alt.X("layer:O", title="Layer (heads side by side)", axis=flat)
            base = base.encode(x=x, xOffset=alt.XOffset("head:O"))
        axis_title = y_title if first else ""
        y = alt.Y(
            "value:Q",
            title=axis_title,
            axis=alt.Axis(grid=True),
            scale=alt.Scale(domain=value_range(frame, rule), nice=True, zero=False),
        )
        drawn: list[Any] = [rule_at(rule)]
        if part["low"].null_count() < part.height:
            interval = base.mark_rule(strokeWidth=1.2, color=colour)
            drawn.append(interval.encode(y=alt.Y("low:Q", title=axis_title), y2="high:Q"))
        shown = ["panel", "layer", "head", "value", "low", "high", "n"]
        point = base.mark_point(filled=True, size=26, opacity=1, color=colour)
        return [*drawn, point.encode(y=y, tooltip=tooltips(part, shown))]

    return panels(frame, "panel", marks, style, gap=20)


def head_strip(frame: pl.DataFrame, style: Style, *, y_title: str = "Value") -> Any:
    """`value` over `rank`, coloured by `layer`, a panel per `panel`, the first heads named.

    For many heads, a second row of panels shows the layers. Columns: these, `name`, and `low` and
    `high`, which are drawn for few heads.
    """
    most = max(frame["rank"])
    few = most < FEW and frame["low"].null_count() < frame.height
    many = most >= MANY
    colour = alt.value(style.theme.filled) if many else _by_layer(frame, style)
    x = _by_rank(most, "" if many else "Head, by rank")
    columns = ("value", "low", "high") if few else ("value",)
    scale = alt.Scale(domain=value_range(frame, 0.0, of=columns), nice=True, zero=False)

    def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
        axis_title = y_title if first else ""
        base = alt.Chart(part).encode(x=x)
        drawn: list[Any] = []
        if few:
            interval = {"y": alt.Y("low:Q", title=axis_title), "y2": "high:Q"}
            drawn.append(base.mark_rule(strokeWidth=1.2).encode(**interval, color=colour))
        size = max(5.0, min(30.0, (0.9 * width / part.height) ** 2))
        point = base.mark_point(filled=True, size=size, opacity=1).encode(
            y=alt.Y("value:Q", title=axis_title, axis=alt.Axis(grid=True), scale=scale),
            color=colour,
            tooltip=tooltips(part, ["panel", "rank", "layer", "head", "value", "low", "high", "n"]),
        )
        names = ["First:", *part.sort("rank")["name"][:NAMED]]
        corner = alt.Chart(empty_row()).mark_text(
            style="faint-text",
            text=names,
            align="right",
            baseline="top",
            lineHeight=style.theme.size + 2,
        )
        return [*drawn, point, corner.encode(x=alt.value(width), y=alt.value(2))]

    drawn = panels(frame, "panel", marks, style, gap=24).resolve_scale(color="shared")
    return alt.vconcat(drawn, _layers(frame, style), spacing=8) if many else drawn


def _by_rank(most: int, title: str) -> alt.X:
    return alt.X(
        "rank:Q",
        title=title,
        axis=alt.Axis(grid=False, tickMinStep=1),
        scale=alt.Scale(domain=[-0.02 * most - 0.5, most + 0.5], nice=False),
    )


def _by_layer(frame: pl.DataFrame, style: Style) -> alt.Color:
    ends = style.theme.diverging
    return alt.Color(
        "layer:Q",
        scale=alt.Scale(
            domain=[min(frame["layer"]), max(frame["layer"])],
            range=[ends[0], ends[-1]],
            interpolate="rgb",
        ),
        legend=alt.Legend(
            orient="top", title="Layer", titleOrient="left", format="d", tickMinStep=1
        ),
    )


def _layers(frame: pl.DataFrame, style: Style) -> Any:
    """The `layer` of every head over its `rank`, the first layer at the top."""
    ends = [min(frame["layer"]) - 0.5, max(frame["layer"]) + 0.5]
    x = _by_rank(max(frame["rank"]), "Head, by rank")

    def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
        y = alt.Y(
            "layer:Q",
            title="Layer" if first else "",
            axis=alt.Axis(grid=False, tickMinStep=1),
            scale=alt.Scale(domain=ends, reverse=True, nice=False, zero=False),
        )
        point = alt.Chart(part).mark_point(filled=True, size=4, color=style.theme.filled)
        shown = tooltips(part, ["panel", "rank", "layer", "head", "value"])
        return [point.encode(x=x, y=y, tooltip=shown)]

    return panels(frame, "panel", marks, replace(style, height=160), gap=24, titled=False)


def side_by_side(
    frame: pl.DataFrame,
    style: Style,
    *,
    x: str,
    x_titles: Mapping[str, str],
    y_title: str,
    rule: float | None = None,
) -> Any:
    """`value` with `low` and `high` over the categories of the column `x`, `series` side by side.

    There is a panel per `panel`; `x_titles` names the x axis of each.
    """
    series = frame["series"].unique(maintain_order=True).to_list()
    colour = alt.Color(
        "series:N",
        scale=alt.Scale(domain=series, range=style.theme.series_colours(len(series))),
        legend=None
        if len(series) == 1
        else alt.Legend(orient="top", title=None, columns=4, labelLimit=400),
    )
    rules = [] if rule is None else [rule]
    scale = alt.Scale(domain=value_range(frame, *rules), nice=True, zero=False)

    def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
        order = part[x].unique(maintain_order=True).to_list()
        flat = 6 * sum(map(len, order)) < width
        axis = alt.Axis(labelAngle=0 if flat else -45, grid=False, labelLimit=200)
        across = alt.X(f"{x}:O", sort=order, title=x_titles[part["panel"][0]], axis=axis)
        base = alt.Chart(part).encode(x=across, color=colour)
        if len(series) > 1:  # the offset of a single series would not be 0
            base = base.encode(xOffset=alt.XOffset("series:N", sort=series))
        axis_title = y_title if first else ""
        drawn: list[Any] = [rule_at(value) for value in rules]
        if part["low"].null_count() < part.height:
            reach = {"y": alt.Y("low:Q", title=axis_title, scale=scale), "y2": "high:Q"}
            drawn.append(base.mark_rule(strokeWidth=1.6).encode(**reach))
        y = alt.Y("value:Q", title=axis_title, scale=scale, axis=alt.Axis(grid=True))
        tooltip = tooltips(part, ["panel", x, "series", "value", "low", "high", "n", "q"])
        point = base.mark_point(filled=True, size=40, opacity=1)
        return [*drawn, point.encode(y=y, tooltip=tooltip)]

    return panels(frame, "panel", marks, style, gap=24).resolve_scale(color="shared")
