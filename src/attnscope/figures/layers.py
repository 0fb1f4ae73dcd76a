"""Lines over layers, a panel per group: what several figures of depth have in common.

This module must not know runs or measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.layout import CLASS_LABELS, columns_for, panel_title, tips
from attnscope.figures.theme import Theme

__all__ = ["layer_areas", "layer_lines", "spread"]


def spread(frame: pl.DataFrame, *also: float) -> list[float]:
    """From the least to the most of values and intervals, and of what else must be seen."""
    found = [*also]
    for column in ("value", "low", "high"):
        found += [v for v in (frame[column].min(), frame[column].max()) if isinstance(v, float)]
    return [min(found), max(found)]


def _x(layers: Sequence[int]) -> alt.X:
    few = len(layers) <= 12
    return alt.X(
        "layer:Q",
        title="Layer",
        axis=alt.Axis(
            format="d", grid=False, tickMinStep=1, values=list(layers) if few else alt.Undefined
        ),
        scale=alt.Scale(domain=[min(layers) - 0.3, max(layers) + 0.3], nice=False),
    )


def _colour(series: str, colours: Mapping[str, str]) -> alt.Color:
    labels = {k: v for k, v in CLASS_LABELS.items() if k in colours}
    return alt.Color(
        f"{series}:N",
        scale=alt.Scale(domain=list(colours), range=list(colours.values())),
        legend=alt.Legend(
            orient="top",
            title=None,
            columns=6,
            symbolOpacity=1,
            labelExpr=f"({labels})[datum.label] || datum.label",
        ),
    )


def layer_lines(
    frame: pl.DataFrame,
    colours: Mapping[str, str],
    *,
    series: str,
    panel: str,
    y_titles: Mapping[str, str],
    theme: Theme,
    width: float,
    height: float,
    rule: float | None = None,
    own_scale: bool = False,
    start: float | None = 0.0,
) -> Any:
    """`value` over `layer`, one line per `series`, its interval as a band, a panel per `panel`.

    `y_titles` names the y axis of each panel and gives their order; `rule` is a line across;
    `start` is a value that must be in sight. With `own_scale` the panels are different quantities,
    each named by its axis.
    """
    columns = columns_for(len(y_titles), 3)
    wide = width / columns - (18 if columns > 1 else 0)
    titled = len(y_titles) > 1 and not own_scale
    must = [x for x in (rule, start) if x is not None]
    panels = []
    for i, (name, y_title) in enumerate(y_titles.items()):
        part = frame.filter(pl.col(panel) == name)
        layers = part["layer"].unique().sort().to_list()
        x, colour = _x(layers), _colour(series, colours)
        domain = spread(part if own_scale else frame, *must)
        said = y_title if own_scale or i % columns == 0 else ""
        y = alt.Y(
            "value:Q",
            title=said,
            scale=alt.Scale(domain=domain, nice=True, zero=False),
            axis=alt.Axis(tickCount=6, grid=True),
        )
        base = alt.Chart(part)
        marks: list[Any] = []
        if rule is not None:
            marks.append(
                alt.Chart(alt.InlineData(values=[{}]))
                .mark_rule(style="faint-rule", strokeDash=[5, 3])
                .encode(y=alt.YDatum(rule))
            )
        if part["low"].null_count() < part.height:
            band = base.encode(x=x, y=alt.Y("low:Q", title=said), y2="high:Q", color=colour)
            marks.append(
                band.mark_area(opacity=0.18) if len(layers) > 1 else band.mark_rule(opacity=0.7)
            )
        line = base.encode(
            x=x,
            y=y,
            color=colour,
            tooltip=tips(part, [panel, "layer", series, "value", "low", "high", "n"]),
        )
        if len(layers) > 1:
            marks.append(line.mark_line(strokeWidth=1.6, strokeJoin="round"))
        marks.append(line.mark_point(size=22, filled=True, opacity=1))
        if titled:
            marks.append(panel_title([name], wide, theme))
        panels.append(alt.layer(*marks).properties(width=wide, height=height))
    return alt.concat(*panels, columns=columns, spacing={"row": 26, "column": 26}).resolve_scale(
        color="shared"
    )


def layer_areas(
    frame: pl.DataFrame,
    colours: Mapping[str, str],
    *,
    series: str,
    panel: str,
    y_titles: Mapping[str, str],
    theme: Theme,
    width: float,
    height: float,
) -> Any:
    """Areas between `bottom` and `top` over `layer`, stacked beforehand; bars for one layer."""
    columns = columns_for(len(y_titles), 3)
    wide = width / columns - (18 if columns > 1 else 0)
    panels = []
    highest = max(frame["top"].drop_nulls().to_list(), default=1.0)
    for i, (name, y_title) in enumerate(y_titles.items()):
        part = frame.filter(pl.col(panel) == name)
        layers = part["layer"].unique().sort().to_list()
        base = alt.Chart(part).encode(
            x=_x(layers),
            y=alt.Y(
                "bottom:Q",
                title=y_title if i % columns == 0 else "",
                scale=alt.Scale(domain=[0, highest]),
            ),
            y2="top:Q",
            color=_colour(series, colours),
            tooltip=tips(part, [panel, "layer", series, "value", "low", "high", "n"]),
        )
        marks: list[Any] = [
            base.mark_area(opacity=0.92) if len(layers) > 1 else base.mark_bar(size=wide / 4)
        ]
        if len(y_titles) > 1:
            marks.append(panel_title([name], wide, theme))
        panels.append(alt.layer(*marks).properties(width=wide, height=height))
    return alt.concat(*panels, columns=columns, spacing={"row": 26, "column": 26}).resolve_scale(
        color="shared"
    )
