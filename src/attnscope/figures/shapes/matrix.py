"""Coloured matrices: rows by columns, a panel per group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.shapes.shape import (
    FORMS,
    TALLEST,
    Shape,
    axis_text,
    chart_of,
    columns_for,
    names_in,
    panel_title,
)
from attnscope.figures.text_format import wrap
from attnscope.figures.theme import Style, Theme

NUMBER = 2.6
"""Smallest width of a cell with a number, as a multiple of the font size."""
READABLE, FLAT, SMALL = 7.0, 12.0, 2.0
"""Smallest width and height of a cell in pixels if there is space for it, and smallest at all."""
LEGEND = 56
"""Width of the legend of a panel with its own scale."""
EDGE = 0.01
"""Padding at the ends of an axis, in steps. Without it, rounding may put the first row outside the
axis, and its number is not drawn."""


@dataclass(frozen=True, kw_only=True)
class Matrix(Shape):
    """`value` as colour, `down` and across `x`, a panel per `panel`."""

    x: str = "head"
    x_title: str = "Head"
    down: str = "layer"
    down_title: str = "Layer"
    panel_of: Sequence[str] = ()
    """Columns that together name a panel, if the data have no column for it."""
    scale: str = "panel"
    """A scale of colours per `panel`, or one `shared` by all."""
    from_zero: bool = False
    """Whether the colours begin at 0."""
    colour_of: Mapping[str, str] = field(default_factory=dict)
    """Name → colour, if the values are names."""
    marked: str | None = None
    """A column that is true where a cell has a dot."""
    mark_means: str = ""
    numbers: int = 0
    """Largest number of rows and columns for which cells show their numbers."""

    rank = 3
    rule_sign = "no colour"

    @property
    def drawn(self) -> str:
        panels = f"; a panel for each {' and '.join(self.panel_of)}" if self.panel_of else ""
        dots = f"; dot: {self.mark_means}" if self.marked else ""
        separate = "; each panel has its own scale of colours" if self.scale == "panel" else ""
        what = f"{self.down_title.lower()} down, {self.x_title.lower()} across"
        return f"Coloured matrices of {self.y}: {what}{dots}{panels}{separate}"

    @property
    def order(self) -> list[str]:
        return [*(self.panel_of[::-1] or [self.panel]), self.down, self.x]

    @property
    def split(self) -> list[str]:
        return list(self.panel_of) or [self.panel]

    def ranked(self, frame: pl.DataFrame) -> str | None:
        return self.x if frame.schema[self.x] == pl.String else None

    def axes(self, frame: pl.DataFrame) -> list[str]:
        return [
            axis_text("x", self.x_title, frame, self.x),
            axis_text("y", self.down_title, frame, self.down),
        ]

    def interval(self, frame: pl.DataFrame) -> str | None:
        return None

    def _with_panel(self, frame: pl.DataFrame) -> pl.DataFrame:
        if not self.panel_of:
            return frame
        named = [pl.format(FORMS.get(c, "{}"), c) for c in self.panel_of]
        return frame.with_columns(pl.concat_str(named, separator=", ").alias(self.panel))

    def draw(self, frame: pl.DataFrame, style: Style) -> Any:
        frame, theme = self._with_panel(frame), style.theme
        names = names_in(frame, self.panel) if self.panel in frame.columns else [None]
        across, down = (self._values(frame, c) for c in (self.x, self.down))
        separate = self.scale == "panel" and len(names) > 1
        texts = max(len(across), len(down)) <= self.numbers
        columns, wide, tall = self._layout(
            len(names), len(across), len(down), style, separate, texts
        )
        panels = []
        for i, name in enumerate(names):
            part = frame if name is None else frame.filter(pl.col(self.panel) == name)
            last = i + columns >= len(names)
            title = self.x_title if last else ""
            x = alt.X(f"{self.x}:O", title=title, **_axis(across, wide, theme.size))
            title = "" if i % columns else self.down_title
            y = alt.Y(f"{self.down}:O", title=title, **_axis(down, math.inf, theme.size))
            base = chart_of(part).encode(x=x, y=y)
            scale = self._scale(part if separate else frame, theme)
            size = {"width": wide * len(across), "height": tall * len(down)}
            colour = self._colour(scale, style, size["height"] if separate else None)
            tip = self.tooltip(part, self.down, self.value)
            marks: list[Any] = [base.mark_rect().encode(color=colour, tooltip=tip)]
            if texts and wide >= NUMBER * theme.size:
                middle = (scale[0][0] + scale[0][-1]) / 2
                light = alt.datum[self.value] > middle
                text = base.mark_text(fontSize=theme.size - 1).encode(
                    text=alt.Text(f"{self.value}:Q", format=".2f"),
                    color=alt.condition(light, alt.value("#ffffff"), alt.value("#111111")),
                )
                marks.append(text)
            if self.marked is not None:
                dot = max(4, min(34, (min(wide, tall) * 0.38) ** 2))
                marks.append(_dots(base.transform_filter(alt.datum[self.marked]), dot))
            if len(names) > 1:
                marks.append(panel_title([name], size["width"], theme))
            panels.append(alt.layer(*marks).properties(**size))
        spacing: Any = {"row": 30, "column": 24}
        scales: Any = "independent" if separate else "shared"
        return alt.concat(*panels, columns=columns, spacing=spacing).resolve_scale(color=scales)

    def _layout(
        self, panels: int, across: int, down: int, style: Style, separate: bool, texts: bool
    ) -> tuple[int, float, float]:
        """Panels per row, width and height of a cell. More panels stand in a row, with smaller
        cells, if the figure would be taller than two screens."""
        most_wide, most_tall = (46.0, 30.0) if texts else (40.0, 22.0)
        readable = NUMBER * style.theme.size if texts else READABLE

        def wide(columns: int) -> float:
            between = (30 + LEGEND * separate) if columns > 1 else LEGEND * separate
            return min(most_wide, (style.width / columns - between) / across)

        def tall(columns: int) -> float:
            highest = (TALLEST / -(-panels // columns) - 60) / down
            return min(most_tall, max(wide(columns), FLAT), highest)

        columns = next((n for n in (3, 2) if n <= panels and wide(n) >= readable), 1)
        if tall(columns) < min(max(wide(columns), FLAT), most_tall):
            columns = max(range(1, min(panels, 5) + 1), key=lambda n: min(wide(n), tall(n)))
        columns = columns_for(panels, columns)
        return columns, max(SMALL, wide(columns)), max(SMALL, tall(columns))

    def width(self, frame: pl.DataFrame) -> float:
        frame = self._with_panel(frame)
        panels = frame[self.panel].n_unique() if self.panel in frame.columns else 1
        return {1: 480, 2: 700}.get(panels, 900)

    def _values(self, frame: pl.DataFrame, column: str) -> list[Any]:
        """The values of an axis: numbers in their order, names in that of the rows."""
        if frame.schema[column].is_numeric():
            return frame[column].unique().sort().to_list()
        return names_in(frame, column)

    def _scale(self, frame: pl.DataFrame, theme: Theme) -> tuple[list[float], Sequence[str]]:
        """The domain and the colours: from little to much, or to both sides of the middle."""
        if self.colour_of:
            return [], ()
        known = frame[self.value].drop_nulls().to_list() or [0.0]
        low, high, middle = min(known), max(known), self.rule
        if middle is None and low < 0:
            middle = 0.0
        colours = theme.sequential if middle is None else theme.diverging
        if middle is not None:
            far = max(high - middle, middle - low) or 1.0
            # Not below 0 if no value is: a lift or a ratio cannot be.
            low = 0.0 if low >= 0 and far > 0.95 * middle > 0 else middle - far
            halves = (low, middle), (middle, middle + far)
            steps = len(colours) // 2
            stops = [a + (b - a) * i / steps for a, b in halves for i in range(steps)]
            return [*stops, middle + far], colours
        if self.from_zero or 0 <= low < high / 2:
            low = 0.0
        step = (high - low or 1.0) / (len(colours) - 1)
        return [low + step * i for i in range(len(colours))], colours

    def _colour(
        self, scale: tuple[list[float], Sequence[str]], style: Style, beside: float | None
    ) -> alt.Color:
        """The colours, with a legend above all panels, or `beside` a panel of this height."""
        if self.colour_of:
            named = alt.Scale(domain=list(self.colour_of), range=list(self.colour_of.values()))
            legend = alt.Legend(orient="right", symbolType="square", title=None)
            return alt.Color(f"{self.value}:N", scale=named, legend=legend)
        domain, colours = scale
        shown: dict[str, Any] = {"values": domain[::2], "format": ".2~g", "titleLimit": 2_000}
        if beside is not None:
            length = max(24.0, min(90.0, beside))
            shown |= {"orient": "right", "title": None, "offset": 6}
            legend = alt.Legend(**shown, gradientLength=length, gradientThickness=8)
        else:
            lines = wrap(self.y, max(style.width, 400), style.theme.size)
            at: Any = "left" if len(self.y) < 60 else "top"
            legend = alt.Legend(**shown, orient="top", title=lines, titleOrient=at, titlePadding=10)
        return alt.Color(
            f"{self.value}:Q",
            scale=alt.Scale(domain=domain, range=list(colours), interpolate="rgb", clamp=True),
            legend=legend,
        )


def _axis(order: Sequence[Any], step: float, size: float) -> dict[str, Any]:
    """An axis of cells; labels that do not fit are left out, or rotated if they are names."""
    longest = max(len(str(value)) for value in order) * size * 0.56
    names = not all(isinstance(value, int | float) for value in order)
    axis: dict[str, Any] = {"labelAngle": -45 if names and longest > step else 0}
    axis |= {"ticks": False, "domain": False, "labelOverlap": False if names else "greedy"}
    return {
        "sort": list(order),
        "axis": alt.Axis(**axis, labelSeparation=3),
        "scale": alt.Scale(domain=list(order), paddingInner=0.04, paddingOuter=EDGE),
    }


def _dots(base: Any, size: float) -> Any:
    return base.mark_point(
        filled=True, size=size, color="#111111", stroke="#ffffff", strokeWidth=0.8, opacity=1
    )
