"""Draws coloured matrices: rows by columns, a panel per group, one shared colour scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.charts.common import columns_for, panel_title, tooltips
from attnscope.figures.text_format import wrap
from attnscope.figures.theme import Style

NUMBER = 2.6
"""Smallest width of a cell with a number, as a multiple of the font size."""
EDGE = 0.01
"""Padding at the ends of an axis, in steps. Without it, rounding may put the first row outside the
axis, and its number is not drawn."""


def head_matrices(frame: pl.DataFrame, style: Style, **settings: Any) -> Any:
    """`matrices` of `layer` (down) by `head` (across); with many heads, fewer panels per row."""
    heads, layers = (frame[c].unique().sort().to_list() for c in ("head", "layer"))
    few = max(1, min(3, int(style.width / (7 * len(heads)))))
    across: dict[str, Any] = {"x": "head", "x_order": heads, "x_title": "Head"}
    down: dict[str, Any] = {"y": "layer", "y_order": layers, "y_title": "Layer"}
    return matrices(frame, style, **across, **down, most=few, **settings)


def matrices(
    frame: pl.DataFrame,
    style: Style,
    *,
    x: str,
    y: str,
    panel: str,
    x_order: Sequence[Any],
    y_order: Sequence[Any],
    x_title: str,
    y_title: str,
    value: str = "value",
    value_title: str,
    domain: Sequence[float],
    colours: Sequence[str],
    marked: str | None = None,
    texts: bool = False,
    most: int = 3,
) -> Any:
    """`value` as colour at `x` and `y`, a panel per `panel`; `marked` rows get a dot."""
    theme = style.theme
    names = frame[panel].unique(maintain_order=True).to_list()
    columns = columns_for(len(names), most)
    wide = style.width / columns - (26 if columns > 1 else 0)
    step = max(5.0, min(46.0 if texts else 26.0, wide / len(x_order)))
    tall = max(5.0, min(30.0 if texts else 22.0, step))
    texts = texts and step >= NUMBER * theme.size
    colour = alt.Color(
        f"{value}:Q",
        scale=alt.Scale(domain=list(domain), range=list(colours), interpolate="rgb", clamp=True),
        legend=_legend(value_title, domain, style),
    )
    across = _across(x, x_order, x_title, step, theme.size)
    panels = []
    for i, name in enumerate(names):
        part = frame.filter(pl.col(panel) == name)
        down = _down(y, y_order, y_title if i % columns == 0 else "", tall, theme.size)
        base = alt.Chart(part).encode(x=across, y=down)
        tip = tooltips(part, [panel, y, x, value, "low", "high", "n", "q"])
        marks: list[Any] = [base.mark_rect().encode(color=colour, tooltip=tip)]
        if texts:
            marks += _texts(base, value, domain, theme.size)
        if marked is not None:
            dot = max(6, min(34, (min(step, tall) * 0.38) ** 2))
            marks.append(_dots(base.transform_filter(alt.datum[marked]), dot))
        if len(names) > 1:
            marks.append(panel_title([name], step * len(x_order), theme))
        size = {"width": step * len(x_order), "height": tall * len(y_order)}
        panels.append(alt.layer(*marks).properties(**size))
    return alt.concat(*panels, columns=columns, spacing={"row": 26, "column": 30}).resolve_scale(
        color="shared"
    )


def _legend(title: str, domain: Sequence[float], style: Style) -> alt.Legend:
    lines = wrap(title, max(style.width, 400), style.theme.size)
    at: Any = "left" if len(title) < 60 else "top"
    shown: dict[str, Any] = {"values": list(domain)[::2], "format": ".2~g", "titleLimit": 2_000}
    return alt.Legend(orient="top", title=lines, titleOrient=at, titlePadding=10, **shown)


def _ticks(order: Sequence[Any], step: float, size: float) -> Any:
    """The labels that fit: all, or every second, fifth …"""
    if step >= size * 1.15 or not all(isinstance(v, int) for v in order):
        return alt.Undefined
    gap = next(g for g in (2, 5, 10, 20, 50, 100, 10_000) if g * step >= size * 1.4)
    named = [v for v in order if v % gap == 0]
    if (
        named and order[-1] != named[-1]
    ):  # the last one gets a label, in place of a label that is too near
        near = (order.index(order[-1]) - order.index(named[-1])) * step < size * 1.4
        named = [*(named[:-1] if near else named), order[-1]]
    return named


def _across(field: str, order: Sequence[Any], title: str, step: float, size: float) -> alt.X:
    longest = max(len(str(v)) for v in order) * size * 0.56
    every = max(1, int(-(-size * 1.5 // step)))
    angle = 0 if longest < step * every else -45
    values = _ticks(order, step if longest < step else step * 0.6, size)
    return alt.X(f"{field}:O", title=title, **_ordinal(order, values, labelAngle=angle))


def _down(field: str, order: Sequence[Any], title: str, step: float, size: float) -> alt.Y:
    return alt.Y(f"{field}:O", title=title, **_ordinal(order, _ticks(order, step, size)))


def _ordinal(order: Sequence[Any], values: Any, **axis: Any) -> dict[str, Any]:
    return {
        "sort": list(order),
        "axis": alt.Axis(values=values, ticks=False, domain=False, labelOverlap=False, **axis),
        "scale": alt.Scale(domain=list(order), paddingInner=0.04, paddingOuter=EDGE),
    }


def _texts(base: Any, value: str, domain: Sequence[float], size: float) -> list[Any]:
    """Numbers in the cells: dark on the light half of the scale, light on the dark."""
    middle = domain[0] + 0.5 * (domain[-1] - domain[0])
    halves = (("#ffffff", alt.datum[value] > middle), ("#111111", alt.datum[value] <= middle))
    return [
        base.transform_filter(keep)
        .mark_text(fontSize=size - 1, color=colour)
        .encode(text=alt.Text(f"{value}:Q", format=".2f"))
        for colour, keep in halves
    ]


def _dots(base: Any, size: float) -> Any:
    return base.mark_point(
        filled=True, size=size, color="#111111", stroke="#ffffff", strokeWidth=0.8, opacity=1
    )
