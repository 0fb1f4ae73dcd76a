"""Heat maps over a picture: a panel for each choice of queries and each layer or head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.shapes.matrix import Matrix
from attnscope.figures.shapes.shape import TALLEST, chart_of, names_in, panel_title, tooltips
from attnscope.figures.theme import Style

OPACITY = 0.62
"""Of the cells: the picture can be seen below them."""
SMALLEST = 90.0
"""Width of a panel in pixels."""


@dataclass(frozen=True, kw_only=True)
class PictureMap(Matrix):
    """Cells from (`left`, `top`) to (`right`, `bottom`) over the picture, in its pixels; a row of
    panels for each `rows_of`, a panel in it for each `panel`."""

    rows_of: str = "queries"
    picture: str = ""
    """A `data:` URL; empty if the file cannot be read."""
    size: Sequence[int] = (1, 1)
    """Height and width of the picture in pixels."""
    box: Sequence[float] = ()
    """Left, top, right and bottom of an outline in pixels; empty for none."""
    scale: str = "shared"
    from_zero: bool = True
    x: str = "column"
    x_title: str = "Column of the picture"
    down: str = "row"
    down_title: str = "Row of the picture"

    rank = 6

    @property
    def drawn(self) -> str:
        what = "Heat maps over a picture" if self.picture else "Heat maps of a picture"
        return f"{what}: {self.y}; a row of maps for each choice of queries"

    @property
    def split(self) -> list[str]:
        return [self.rows_of, self.panel]

    @property
    def order(self) -> list[str]:
        return [self.rows_of, self.panel, self.down, self.x]

    def width(self, frame: pl.DataFrame) -> float:
        return {1: 480, 2: 700}.get(frame[self.panel].n_unique(), 900)

    def draw(self, frame: pl.DataFrame, style: Style) -> Any:
        columns, rows = (names_in(frame, name) for name in (self.panel, self.rows_of))
        left, right = frame["left"].min(), frame["right"].max()
        top, bottom = frame["top"].min(), frame["bottom"].max()
        assert isinstance(left, float)
        assert isinstance(right, float)
        assert isinstance(top, float)
        assert isinstance(bottom, float)
        wide = max(SMALLEST, style.width / len(columns) - 26)
        tall = wide * (bottom - top) / (right - left)
        if tall > (most := TALLEST / len(rows) - 60):
            wide, tall = wide * most / tall, most
        x = alt.X("left:Q", axis=None, scale=alt.Scale(domain=[left, right], nice=False))
        y = alt.Y("top:Q", axis=None, scale=alt.Scale(domain=[bottom, top], nice=False))
        colour = self._colour(self._scale(frame, style.theme), style, None)
        panels = []
        for row in rows:
            for column in columns:
                part = frame.filter(pl.col(self.rows_of) == row, pl.col(self.panel) == column)
                base = chart_of(part).encode(x=x, x2="right:Q", y=y, y2="bottom:Q", color=colour)
                shown = [self.rows_of, self.panel, self.down, self.x, self.value]
                cells = base.mark_rect(opacity=OPACITY if self.picture else 1).encode(
                    tooltip=tooltips(part, shown)
                )
                names = [f"{name}" for name in (row, column) if name]
                marks = [cells, panel_title([", ".join(names)], wide, style.theme)]
                if self.picture:
                    scale = wide / (right - left), tall / (bottom - top)
                    marks.insert(0, self._background(left, top, scale))
                if self.box:
                    marks.append(self._outline(x, y))
                panels.append(alt.layer(*marks).properties(width=wide, height=tall))
        spacing: Any = {"row": 26, "column": 18}
        chart = alt.concat(*panels, columns=len(columns), spacing=spacing)
        return chart.resolve_scale(color="shared")

    def _outline(self, x: Any, y: Any) -> Any:
        """The box."""
        corners = dict(zip(("left", "top", "right", "bottom"), self.box, strict=True))
        mark = chart_of(pl.DataFrame([corners])).mark_rect(
            filled=False, stroke="black", strokeWidth=1.5, tooltip=False
        )
        return mark.encode(x=x, x2="right:Q", y=y, y2="bottom:Q")

    def _background(self, left: float, top: float, scale: tuple[float, float]) -> Any:
        """The picture; the maps may reach beyond it, where the processor pads it."""
        height, width = self.size
        mark = chart_of().mark_image(
            url=self.picture,
            width=width * scale[0],
            height=height * scale[1],
            align="left",
            baseline="top",
            aspect=False,
        )
        return mark.encode(x=alt.value(-left * scale[0]), y=alt.value(-top * scale[1]))
