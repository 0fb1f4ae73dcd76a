"""Lines with intervals as bands, over layers, positions or numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.shapes.shape import LABEL, Shape, chart_of, rule_at, value_range
from attnscope.figures.theme import Style, Theme

DASHES = ([1, 0], [6, 3], [2, 2])
TICKS = 12
"""Largest number of whole numbers that each get a tick."""


@dataclass(frozen=True, kw_only=True)
class Lines(Shape):
    """`value` with `low` and `high` over `x`, a line per `series`, a panel per `panel`.

    An x axis of floats begins at 0. If `y` has a title for each panel, panels are different
    quantities, each with its own scale.
    """

    series: str = "series"
    x: str = "layer"
    x_title: str = "Layer"
    zero: bool = True
    """Whether the y axis contains 0."""

    rank = 1
    intervals = ", drawn as bands"

    @property
    def drawn(self) -> str:
        return f"Lines over {self.x_title.lower()}"

    def ranked(self, frame: pl.DataFrame) -> str | None:
        several = frame[self.series].n_unique() > 1
        return self.series if several and self.series != "layer" else None

    def hollow(self, frame: pl.DataFrame) -> bool:
        return self.interval(frame) is not None and frame["low"].null_count() > 0

    def width(self, frame: pl.DataFrame) -> float:
        one = frame[self.x].n_unique() == 1
        return 260 * len(self.parts(frame)) if one else super().width(frame)

    def draw(self, frame: pl.DataFrame, style: Style) -> Any:
        own_scale = not isinstance(self.y, str)
        x, colour = self._across(frame), self._colour(frame, style.theme)

        def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
            title = self.y if first else ""
            if own_scale:
                name = part[self.panel][0]
                title = self.y.get(name, name)
            zero = 0.0 if self.zero else None
            ends = value_range(part if own_scale else frame, self.rule, zero)
            scale = alt.Scale(domain=ends, nice=True, zero=False)
            y = alt.Y("value:Q", title=title, scale=scale, axis=alt.Axis(tickCount=6, grid=True))
            base = chart_of(part).encode(x=x, **colour)
            reach = base.encode(y=alt.Y("low:Q", title=title), y2="high:Q")
            line = base.encode(y=y, tooltip=self.tooltip(part, "name"))
            return [*rule_at(self.rule), *_marks(part, line, reach, self.x)]

        return self.panels(frame, marks, style, gap=18, titled=not own_scale)

    def _across(self, frame: pl.DataFrame) -> alt.X:
        places = frame[self.x].unique().sort().to_list()
        if frame.schema[self.x].is_float():
            scale = alt.Scale(domain=[0, max(places) * 1.04], nice=False)
            axis = alt.Axis(grid=False)
        else:
            scale = alt.Scale(domain=[min(places) - 0.3, max(places) + 0.3], nice=False)
            ticks = places if len(places) <= TICKS else alt.Undefined
            axis = alt.Axis(format="d", grid=False, tickMinStep=1, values=ticks)
        return alt.X(f"{self.x}:Q", title=self.x_title, axis=axis, scale=scale)

    def _colour(self, frame: pl.DataFrame, theme: Theme) -> dict[str, Any]:
        """A colour for each series, and dashes for those beyond the colours of the theme."""
        names, several = list(self.colours(frame, theme)), len(theme.models)
        shown: dict[str, Any] = {"columns": 6, "labelExpr": LABEL}
        if frame.schema[self.series] != pl.String:
            shown = {"title": self.series.capitalize(), "titleOrient": "left", "columns": 8}
        if len(names) <= several or self.series == "class":
            return {"color": self.colour(frame, theme, **shown)}
        colour = self.colour(frame, theme, **shown, symbolType="stroke", symbolSize=300)
        dashes = [DASHES[i // several % len(DASHES)] for i in range(len(names))]
        scale = alt.Scale(domain=names, range=dashes)
        dash = alt.StrokeDash(colour["shorthand"], scale=scale, legend=colour["legend"])
        return {"color": colour, "strokeDash": dash}


def _marks(part: pl.DataFrame, line: Any, band: Any, x: str) -> list[Any]:
    """Bands, lines and points of one panel; points without an interval are hollow.

    If x has only one value, bands are vertical rules and there are no lines.
    """
    many, without = part[x].n_unique() > 1, part["low"].null_count()
    marks: list[Any] = []
    if without < part.height:
        marks.append(band.mark_area(opacity=0.18) if many else band.mark_rule(opacity=0.7))
    if many:
        marks.append(line.mark_line(strokeWidth=1.6, strokeJoin="round"))
    if 0 < without < part.height:
        none = line.transform_filter(alt.datum.low == None)  # noqa: E711
        marks.append(none.mark_point(size=44, filled=False, strokeWidth=1.2, opacity=1))
        line = line.transform_filter(alt.datum.low != None)  # noqa: E711
    return [*marks, line.mark_point(size=22, filled=True, opacity=1)]
