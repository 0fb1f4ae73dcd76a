"""Coloured matrices: rows by columns, a panel per group, one colour scale for all.

This module must not know runs or measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.layout import columns_for, panel_title, tips
from attnscope.figures.theme import Theme
from attnscope.figures.words import wrap

__all__ = ["matrices"]


def matrices(
    frame: pl.DataFrame,
    *,
    x: str,
    y: str,
    panel: str,
    x_order: Sequence[Any],
    y_order: Sequence[Any],
    x_title: str,
    y_title: str,
    value: str,
    value_title: str,
    domain: Sequence[float],
    colours: Sequence[str],
    theme: Theme,
    width: float,
    marked: str | None = None,
    texts: bool = False,
    most: int = 3,
) -> Any:
    """`value` as colour at `x` and `y`, a panel per `panel`; `marked` rows get a dot."""
    names = frame[panel].unique(maintain_order=True).to_list()
    columns = columns_for(len(names), most)
    wide = width / columns - (26 if columns > 1 else 0)
    step = max(5.0, min(46.0 if texts else 26.0, wide / len(x_order)))
    tall = max(5.0, min(30.0 if texts else 22.0, step))
    longest = max(len(str(v)) for v in x_order) * theme.size * 0.56
    scale = alt.Scale(domain=list(domain), range=list(colours), interpolate="rgb", clamp=True)
    legend = alt.Legend(
        orient="top",
        title=wrap(value_title, max(width, 400), theme.size),
        titleOrient="left" if len(value_title) < 60 else "top",
        titleLimit=2_000,
        titlePadding=10,
        values=list(domain)[::2],
        format=".2~g",
    )
    every = max(1, int(-(-theme.size * 1.5 // step)))

    def ticks(order: Sequence[Any], size: float) -> Any:
        """Labels that fit: all, or every second, fifth …"""
        if size >= theme.size * 1.15 or not all(isinstance(v, int) for v in order):
            return alt.Undefined
        gap = next(g for g in (2, 5, 10, 20, 50, 100, 10_000) if g * size >= theme.size * 1.4)
        return [v for v in order if v % gap == 0]

    panels = []
    for i, name in enumerate(names):
        part = frame.filter(pl.col(panel) == name)
        base = alt.Chart(part).encode(
            x=alt.X(
                f"{x}:O",
                sort=list(x_order),
                title=x_title,
                axis=alt.Axis(
                    labelAngle=0 if longest < step * every else -45,
                    values=ticks(x_order, step if longest < step else step * 0.6),
                    ticks=False,
                    domain=False,
                    labelOverlap=False,
                ),
                scale=alt.Scale(domain=list(x_order), paddingInner=0.04, paddingOuter=0),
            ),
            y=alt.Y(
                f"{y}:O",
                sort=list(y_order),
                title=y_title if i % columns == 0 else "",
                axis=alt.Axis(
                    values=ticks(y_order, tall), ticks=False, domain=False, labelOverlap=False
                ),
                scale=alt.Scale(domain=list(y_order), paddingInner=0.04, paddingOuter=0),
            ),
        )
        shown = [panel, y, x, value, "low", "high", "n", "q"]
        marks: list[Any] = [
            base.mark_rect().encode(
                color=alt.Color(f"{value}:Q", scale=scale, legend=legend), tooltip=tips(part, shown)
            )
        ]
        if texts:
            # Dark text on the light half of the scale, light on the dark.
            middle = domain[0] + 0.5 * (domain[-1] - domain[0])
            for dark, keep in (
                ("#ffffff", alt.datum[value] > middle),
                ("#111111", alt.datum[value] <= middle),
            ):
                marks.append(
                    base.transform_filter(keep)
                    .mark_text(fontSize=theme.size - 1, color=dark)
                    .encode(text=alt.Text(f"{value}:Q", format=".2f"))
                )
        if marked is not None:
            marks.append(
                base.transform_filter(alt.datum[marked]).mark_point(
                    filled=True,
                    size=max(6, min(34, (min(step, tall) * 0.38) ** 2)),
                    color="#111111",
                    stroke="#ffffff",
                    strokeWidth=0.8,
                    opacity=1,
                )
            )
        if len(names) > 1:
            marks.append(panel_title([name], step * len(x_order), theme))
        panels.append(
            alt.layer(*marks).properties(width=step * len(x_order), height=tall * len(y_order))
        )
    return alt.concat(*panels, columns=columns, spacing={"row": 26, "column": 30}).resolve_scale(
        color="shared"
    )
