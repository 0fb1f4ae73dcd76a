"""Draws lines with intervals as bands, or stacked areas, over layers or over numbers."""

from collections.abc import Mapping
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.charts.common import CLASS_LABELS, panels, rule_at, tooltips, value_range
from attnscope.figures.theme import Style


def _layers(part: pl.DataFrame) -> alt.X:
    layers = part["layer"].unique().sort().to_list()
    ticks = layers if len(layers) <= 12 else alt.Undefined
    return alt.X(
        "layer:Q",
        title="Layer",
        axis=alt.Axis(format="d", grid=False, tickMinStep=1, values=ticks),
        scale=alt.Scale(domain=[min(layers) - 0.3, max(layers) + 0.3], nice=False),
    )


def _colour(series: str, colours: Mapping[str, str]) -> alt.Color:
    labels = {k: v for k, v in CLASS_LABELS.items() if k in colours}
    label = f"({labels})[datum.label] || datum.label"
    return alt.Color(
        f"{series}:N",
        scale=alt.Scale(domain=list(colours), range=list(colours.values())),
        legend=alt.Legend(orient="top", title=None, columns=6, symbolOpacity=1, labelExpr=label),
    )


def _field(x: alt.X) -> str:
    return str(x["shorthand"]).partition(":")[0]


def _marks(
    part: pl.DataFrame, x: alt.X, y: dict[str, Any], colour: alt.Color, tip: Any, size: float
) -> list[Any]:
    """Bands, lines and points of one panel; points without an interval are hollow.

    If x has only one value, bands are vertical rules and there are no lines.
    """
    base = alt.Chart(part)
    many = part[_field(x)].n_unique() > 1
    marks: list[Any] = []
    bands = part["low"].null_count() < part.height
    if bands:
        band = base.encode(x=x, y=alt.Y("low:Q", title=y["title"]), y2="high:Q", color=colour)
        marks.append(band.mark_area(opacity=0.18) if many else band.mark_rule(opacity=0.7))
    line = base.encode(x=x, y=alt.Y("value:Q", **y), color=colour, tooltip=tip)
    if many:
        marks.append(line.mark_line(strokeWidth=1.6, strokeJoin="round"))
    if bands and part["low"].null_count():
        none = line.transform_filter(alt.datum.low == None)  # noqa: E711
        marks.append(none.mark_point(size=2 * size, filled=False, strokeWidth=1.2, opacity=1))
        line = line.transform_filter(alt.datum.low != None)  # noqa: E711
    return [*marks, line.mark_point(size=size, filled=True, opacity=1)]


def layer_lines(
    frame: pl.DataFrame,
    style: Style,
    colours: Mapping[str, str],
    *,
    series: str,
    panel: str,
    y_titles: Mapping[str, str],
    rule: float | None = None,
    own_scale: bool = False,
) -> Any:
    """`value` over `layer`, one line per `series`, its interval as a band, a panel per `panel`.

    `y_titles` names the y axis of each panel; `rule` is a horizontal line. With
    `own_scale` the panels are different quantities, each named by its axis.
    """
    rules = [] if rule is None else [rule]

    def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
        domain = value_range(part if own_scale else frame, *rules, 0.0)
        y: dict[str, Any] = {
            "title": y_titles[part[panel][0]] if own_scale or first else "",
            "scale": alt.Scale(domain=domain, nice=True, zero=False),
            "axis": alt.Axis(tickCount=6, grid=True),
        }
        tip = tooltips(part, [panel, "layer", series, "value", "low", "high", "n"])
        drawn = _marks(part, _layers(part), y, _colour(series, colours), tip, size=22)
        return [*map(rule_at, rules), *drawn]

    chart = panels(frame, panel, marks, style, gap=18, titled=not own_scale)
    return chart.resolve_scale(color="shared")


def layer_areas(
    frame: pl.DataFrame,
    style: Style,
    colours: Mapping[str, str],
    *,
    series: str,
    panel: str,
    y_titles: Mapping[str, str],
) -> Any:
    """Areas from `bottom` to `top` over `layer`, one per `series`, a panel per `panel`."""
    scale = alt.Scale(domain=[0, max(frame["top"].drop_nulls().to_list(), default=1.0)])

    def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
        base = alt.Chart(part).encode(
            x=_layers(part),
            y=alt.Y("bottom:Q", title=y_titles[part[panel][0]] if first else "", scale=scale),
            y2="top:Q",
            color=_colour(series, colours),
            tooltip=tooltips(part, [panel, "layer", series, "value", "low", "high", "n"]),
        )
        many = part["layer"].n_unique() > 1
        return [base.mark_area(opacity=0.92) if many else base.mark_bar(size=width / 4)]

    return panels(frame, panel, marks, style, gap=18).resolve_scale(color="shared")


def lines_over(
    frame: pl.DataFrame, style: Style, *, x: str, x_title: str, y_title: str, rule: float
) -> Any:
    """`value` over the column `x` from 0, a line per `layer`, a panel per `panel`."""
    layers = frame["layer"].unique().sort().to_list()
    colour = alt.Color(
        "layer:O",
        scale=alt.Scale(domain=layers, range=style.theme.series_colours(len(layers))),
        legend=alt.Legend(
            orient="top", title="Layer", titleOrient="left", symbolOpacity=1, columns=8
        ),
    )
    far = alt.Scale(domain=[0, max(frame[x].to_list()) * 1.04], nice=False)
    across = alt.X(f"{x}:Q", title=x_title, axis=alt.Axis(grid=False), scale=far)
    scale = alt.Scale(domain=value_range(frame, rule), nice=True, zero=False)

    def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
        y: dict[str, Any] = {
            "title": y_title if first else "",
            "axis": alt.Axis(grid=True),
            "scale": scale,
        }
        tip = tooltips(part, ["panel", "condition", x, "layer", "value", "low", "high", "n"])
        return [rule_at(rule), *_marks(part, across, y, colour, tip, size=24)]

    return panels(frame, "panel", marks, style, gap=18).resolve_scale(color="shared")


def curves(frame: pl.DataFrame, style: Style, *, x: str, x_title: str, y_title: str) -> Any:
    """`value` over the whole numbers `x`, a line per `series`, a panel per `panel`."""
    names = frame["series"].unique(maintain_order=True).to_list()
    colours = dict(zip(names, style.theme.series_colours(len(names)), strict=True))
    places = frame[x].unique().sort().to_list()
    across = alt.X(
        f"{x}:Q",
        title=x_title,
        axis=alt.Axis(format="d", grid=False, tickMinStep=1),
        scale=alt.Scale(domain=[min(places) - 0.3, max(places) + 0.3], nice=False),
    )
    scale = alt.Scale(domain=value_range(frame, 0.0), nice=True, zero=False)

    def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
        y: dict[str, Any] = {
            "title": y_title if first else "",
            "axis": alt.Axis(grid=True),
            "scale": scale,
        }
        tip = tooltips(part, ["panel", "series", x, "value", "low", "high", "n"])
        return _marks(part, across, y, _colour("series", colours), tip, size=20)

    return panels(frame, "panel", marks, style, gap=18).resolve_scale(color="shared")
