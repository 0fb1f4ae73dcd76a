"""Lines with their intervals as bands, or stacked areas: over layers, or over any number.

This module must not know runs or measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.charts.parts import CLASS_LABELS, panels, rule_at, spread, tips
from attnscope.figures.theme import Look

__all__ = ["layer_areas", "layer_lines", "lines_over"]


def _layers(frame: pl.DataFrame) -> alt.X:
    layers = frame["layer"].unique().sort().to_list()
    few = len(layers) <= 12
    return alt.X(
        "layer:Q",
        title="Layer",
        axis=alt.Axis(
            format="d", grid=False, tickMinStep=1, values=layers if few else alt.Undefined
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


def _marks(
    part: pl.DataFrame,
    x: alt.X,
    y: alt.Y,
    colour: alt.Color,
    *,
    y_title: str,
    rule: float | None,
    shown: Sequence[str],
    many: bool,
    size: float,
) -> list[Any]:
    """Rule, bands, lines and points of one panel; a point without an interval that others have,
    for want of prompts, is hollow.
    """
    base = alt.Chart(part)
    marks: list[Any] = [] if rule is None else [rule_at(rule)]
    bands = part["low"].null_count() < part.height
    if bands:
        band = base.encode(x=x, y=alt.Y("low:Q", title=y_title), y2="high:Q", color=colour)
        marks.append(band.mark_area(opacity=0.18) if many else band.mark_rule(opacity=0.7))
    line = base.encode(x=x, y=y, color=colour, tooltip=tips(part, shown))
    if many:
        marks.append(line.mark_line(strokeWidth=1.6, strokeJoin="round"))
    if bands and part["low"].null_count():
        few = line.transform_filter(alt.datum.low == None)  # noqa: E711
        marks.append(few.mark_point(size=2 * size, filled=False, strokeWidth=1.2, opacity=1))
        line = line.transform_filter(alt.datum.low != None)  # noqa: E711
    marks.append(line.mark_point(size=size, filled=True, opacity=1))
    return marks


def layer_lines(
    frame: pl.DataFrame,
    look: Look,
    colours: Mapping[str, str],
    *,
    series: str,
    panel: str,
    y_titles: Mapping[str, str],
    rule: float | None = None,
    own_scale: bool = False,
) -> Any:
    """`value` over `layer`, one line per `series`, its interval as a band, a panel per `panel`.

    `y_titles` names the y axis of each panel; `rule` is a line across. With `own_scale` the panels
    are different quantities, each named by its axis.
    """
    must = [0.0] if rule is None else [rule, 0.0]

    def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
        said = y_titles[part[panel][0]] if own_scale or first else ""
        y = alt.Y(
            "value:Q",
            title=said,
            scale=alt.Scale(
                domain=spread(part if own_scale else frame, *must), nice=True, zero=False
            ),
            axis=alt.Axis(tickCount=6, grid=True),
        )
        shown = [panel, "layer", series, "value", "low", "high", "n"]
        return _marks(
            part,
            _layers(part),
            y,
            _colour(series, colours),
            y_title=said,
            rule=rule,
            shown=shown,
            many=part["layer"].n_unique() > 1,
            size=22,
        )

    return panels(frame, panel, marks, look, gap=18, titled=not own_scale).resolve_scale(
        color="shared"
    )


def layer_areas(
    frame: pl.DataFrame,
    look: Look,
    colours: Mapping[str, str],
    *,
    series: str,
    panel: str,
    y_titles: Mapping[str, str],
) -> Any:
    """Areas from `bottom` to `top` over `layer`, one per `series`, a panel per `panel`."""
    highest = max(frame["top"].drop_nulls().to_list(), default=1.0)

    def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
        base = alt.Chart(part).encode(
            x=_layers(part),
            y=alt.Y(
                "bottom:Q",
                title=y_titles[part[panel][0]] if first else "",
                scale=alt.Scale(domain=[0, highest]),
            ),
            y2="top:Q",
            color=_colour(series, colours),
            tooltip=tips(part, [panel, "layer", series, "value", "low", "high", "n"]),
        )
        many = part["layer"].n_unique() > 1
        return [base.mark_area(opacity=0.92) if many else base.mark_bar(size=width / 4)]

    return panels(frame, panel, marks, look, gap=18).resolve_scale(color="shared")


def lines_over(
    frame: pl.DataFrame, look: Look, *, x: str, x_title: str, y_title: str, rule: float
) -> Any:
    """`value` over the column `x` from 0, a line per `layer`, a panel per `panel`."""
    layers = frame["layer"].unique().sort().to_list()
    colour = alt.Color(
        "layer:O",
        scale=alt.Scale(domain=layers, range=look.theme.series_colours(len(layers))),
        legend=alt.Legend(
            orient="top", title="Layer", titleOrient="left", symbolOpacity=1, columns=8
        ),
    )
    along = alt.X(
        f"{x}:Q",
        title=x_title,
        axis=alt.Axis(grid=False),
        scale=alt.Scale(domain=[0, max(frame[x].to_list()) * 1.04], nice=False),
    )

    def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
        y = alt.Y(
            "value:Q",
            title=y_title if first else "",
            axis=alt.Axis(grid=True),
            scale=alt.Scale(domain=spread(frame, rule), nice=True, zero=False),
        )
        shown = ["panel", "condition", x, "layer", "value", "low", "high", "n"]
        return _marks(
            part,
            along,
            y,
            colour,
            y_title=y_title if first else "",
            rule=rule,
            shown=shown,
            many=True,
            size=24,
        )

    return panels(frame, "panel", marks, look, gap=18).resolve_scale(color="shared")
