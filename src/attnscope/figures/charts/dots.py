"""Heads as dots with their intervals: in their layers, or in the order of their values.

This module must not know runs or measures.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.charts.parts import panels, rule_at, spread, tips
from attnscope.figures.theme import Look

__all__ = ["head_dots"]


def head_dots(frame: pl.DataFrame, look: Look, *, y_title: str, rule: float) -> Any:
    """`value` with `low` and `high` per `layer` and `head`, a panel per `panel`."""
    layers = frame["layer"].unique().to_list()
    flat = alt.Axis(labelAngle=0)
    colour = look.theme.filled

    def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
        base = alt.Chart(part)
        if len(layers) == 1:
            title = f"Head of layer {layers[0]}"
            base = base.encode(x=alt.X("head:O", title=title, axis=flat))
        else:
            x = alt.X("layer:O", title="Layer (heads side by side)", axis=flat)
            base = base.encode(x=x, xOffset=alt.XOffset("head:O"))
        said = y_title if first else ""
        y = alt.Y(
            "value:Q",
            title=said,
            axis=alt.Axis(grid=True),
            scale=alt.Scale(domain=spread(frame, rule), nice=True, zero=False),
        )
        drawn: list[Any] = [rule_at(rule)]
        if part["low"].null_count() < part.height:
            interval = base.mark_rule(strokeWidth=1.2, color=colour)
            drawn.append(interval.encode(y=alt.Y("low:Q", title=said), y2="high:Q"))
        shown = ["panel", "layer", "head", "value", "low", "high", "n"]
        point = base.mark_point(filled=True, size=26, opacity=1, color=colour)
        return [*drawn, point.encode(y=y, tooltip=tips(part, shown))]

    return panels(frame, "panel", marks, look, gap=20)
