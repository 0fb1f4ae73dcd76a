"""Profiles of attention over positions as panels: lines, bins with their range, the inserted span.

Used by the figures that draw `average` per token. This module must not know runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.layout import nothing, panel_title, tips
from attnscope.figures.theme import Theme

__all__ = ["lines_panel", "span_of"]


def span_of(frame: pl.DataFrame, role: str = "filler") -> tuple[int, int] | None:
    """First and last position with this role, or None."""
    positions = frame.filter(pl.col("role") == role)["position"]
    if positions.is_empty():
        return None
    first, last = positions.min(), positions.max()
    assert isinstance(first, int)
    assert isinstance(last, int)
    return first, last


def lines_panel(
    frame: pl.DataFrame,
    colours: Mapping[str, str],
    *,
    width: float,
    height: float,
    x_title: str,
    y_title: str,
    spans: Sequence[tuple[int, int, str]] = (),
    theme: Theme,
    title: Sequence[str] = (),
    zoom: str | None = None,
    brush: str | None = None,
    binned: bool = False,
) -> Any:
    """Lines of `value` over `position`, one per `series`; with bins also the range of each.

    `spans` are shaded and labelled above the panel. `zoom` (a name) lets the wheel and a drag move
    along the positions; `brush` (a name) puts an overview below, in which a range can be drawn.
    """
    names = [s for s in colours if s in set(frame["series"])]
    every = list(colours)
    scale = alt.Scale(domain=every, range=[colours[s] for s in every])
    first, last = frame["position"].min(), frame["last"].max()
    assert isinstance(first, int)
    assert isinstance(last, int)
    picked = alt.selection_interval(name=brush, encodings=["x"]) if brush else None
    domain: Any = [first - 0.5, last + 0.5]
    x = alt.X(
        "position:Q",
        title=x_title,
        axis=alt.Axis(grid=False, format=",d", tickMinStep=1, labelFlush=True),
        scale=alt.Scale(domain=picked if picked is not None else domain, nice=False),
    )
    y = alt.Y("value:Q", title=y_title, axis=alt.Axis(tickCount=5))
    colour = alt.Color(
        "series:N",
        scale=scale,
        legend=alt.Legend(
            orient="top", title=None, symbolType="stroke", symbolStrokeWidth=2.5, symbolOpacity=1
        ),
    )
    base = alt.Chart(frame)
    moving = bool(zoom or brush)
    marks: list[Any] = []
    for start, end, _ in spans:
        marks.append(
            alt.Chart(nothing())
            .mark_rect(style="span", clip=moving)
            .encode(x=alt.XDatum(start - 0.5), x2=alt.X2Datum(end + 0.5))
        )
    if binned:
        marks.append(
            base.mark_area(opacity=0.25, interpolate="step-after", clip=moving).encode(
                x=x, y=alt.Y("min:Q", title=y_title), y2="max:Q", color=colour
            )
        )
    line = base.mark_line(strokeWidth=1.3, strokeJoin="round", clip=moving).encode(
        x=x,
        y=y,
        color=colour,
        tooltip=tips(
            frame, ["series", "position", "last", "token", "value", "min", "max", "tokens", "n"]
        ),
    )
    marks.append(line)
    if frame.height <= 60 * max(len(names), 1):
        marks.append(
            base.mark_point(size=9, filled=True, opacity=1, clip=moving).encode(
                x=x, y=y, color=colour
            )
        )
    for start, end, label in spans:
        if label:
            marks.append(
                alt.Chart(nothing())
                .mark_text(style="faint-text", baseline="bottom", dy=-3, text=label, clip=False)
                .encode(x=alt.XDatum((start + end) / 2), y=alt.value(0))
            )
    if title:
        marks.append(panel_title(title, width, theme))
    panel = alt.layer(*marks).properties(width=width, height=height)
    if zoom and picked is None:
        panel = panel.add_params(alt.selection_interval(name=zoom, bind="scales", encodings=["x"]))
    if picked is None:
        return panel
    overview = (
        base.mark_line(strokeWidth=0.8)
        .encode(
            x=alt.X(
                "position:Q",
                title="drag here to look closer",
                axis=alt.Axis(grid=False, format=",d", tickMinStep=1),
                scale=alt.Scale(domain=domain, nice=False),
            ),
            y=alt.Y("value:Q", title=None, axis=None),
            color=colour,
        )
        .properties(width=width, height=36)
        .add_params(picked)
    )
    return alt.vconcat(panel, overview, spacing=6)
