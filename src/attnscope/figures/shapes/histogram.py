"""Overlaid histograms, with lines of text in the corner of each panel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.shapes.shape import Shape, chart_of, names_in, text_mark
from attnscope.figures.theme import Style, Theme


@dataclass(frozen=True, kw_only=True)
class Histogram(Shape):
    """Bars of `value` from `place` to `end`, a colour per `series`, a panel per `panel`."""

    series: str = "series"
    x: str = "place"
    y: str = "Share (square-root scale)"
    corner: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Lines of text in the corner, by panel."""

    rank = 5
    drawn = "Overlaid histograms"

    @property
    def split(self) -> list[str]:
        return [self.panel, self.series]

    def colours(self, frame: pl.DataFrame, theme: Theme) -> dict[Any, str]:
        colours = [theme.without, theme.filled, *theme.models]
        return dict(zip(names_in(frame, self.series), colours, strict=False))

    def draw(self, frame: pl.DataFrame, style: Style) -> Any:
        theme, colour = style.theme, self.colour(frame, style.theme)
        x: dict[str, Any] = {"shorthand": f"{self.x}:Q", "title": self.x_title}
        x["scale"] = alt.Scale(domain=[-1, 1], nice=False)
        x["axis"] = alt.Axis(grid=False, values=[-1, -0.5, 0, 0.5, 1])
        up: dict[str, Any] = {"stack": None, "scale": alt.Scale(type="sqrt", zero=True)}
        up["axis"] = alt.Axis(grid=True, format=".2~g", tickCount=6)
        corner: dict[str, Any] = {"align": "right", "baseline": "top", "style": "faint-text"}
        corner |= {"font": theme.mono, "fontSize": theme.size - 1, "lineHeight": theme.size + 4}

        def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
            y = alt.Y("value:Q", title=self.y if first else "", **up)
            base = chart_of(part).encode(y=y, color=colour)
            bars = base.mark_bar(opacity=0.35, binSpacing=0)
            steps = base.mark_line(interpolate="step-after", strokeWidth=1.4)
            text = text_mark(self.corner.get(part[self.panel][0], []), **corner)
            tip = self.tooltip(part, "end")
            return [
                bars.encode(x=alt.X(**x, bin="binned"), x2="end:Q", tooltip=tip),
                steps.encode(x=alt.X(**x)),
                text.encode(x=alt.value(width - 4), y=alt.value(4)),
            ]

        return self.panels(frame, marks, style)
