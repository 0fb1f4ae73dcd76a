"""Profiles over positions: two panels per head, with bins and the inserted span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.shapes.shape import (
    Shape,
    axis_text,
    chart_of,
    columns_for,
    names_in,
    panel_title,
    tooltips,
)
from attnscope.figures.theme import Style, Theme

HEAD_COLUMNS = ["model", "layer", "head"]


@dataclass(frozen=True, kw_only=True)
class Profile(Shape):
    """Two panels per `model`, `layer` and `head`: the first above, the whole sequence below.

    `value` over `position` to `last`, a line per `series`; `min` and `max` of bins as a band. On
    the screen, the wheel and a drag move along the positions.
    """

    panel_titles: Mapping[str, str] = field(default_factory=dict)
    """The two values of `panel`, each with the title of its x axis."""
    span: str = "filler ({})"
    """The label of the inserted tokens; `{}` is their number."""
    y: str = "Average attention weight"
    series: str = "series"
    theme_colours: Sequence[str] = ("without", "filled")
    """The colours of the theme for the series; none: those of models."""
    own_scale: bool = False
    """Whether the two panels of a head have different scales."""

    rank = 6

    @property
    def split(self) -> list[str]:
        return [*HEAD_COLUMNS, "panel", "series"]

    @property
    def drawn(self) -> str:
        above, below = self.panel_titles
        return f"Line charts, two panels per head: {above} above, {below} below"

    def axes(self, frame: pl.DataFrame) -> list[str]:
        lines = [
            axis_text(f"x, {panel}", title, frame.filter(panel=panel), "position")
            for panel, title in self.panel_titles.items()
        ]
        separate = ", with a separate scale in each panel" if self.own_scale else ""
        return [*lines, axis_text("y", self.y, frame, "value") + separate]

    def interval(self, frame: pl.DataFrame) -> str | None:
        return None

    def width(self, frame: pl.DataFrame) -> float:
        return 780 if frame.select(HEAD_COLUMNS).n_unique() > 1 else 620

    def colours(self, frame: pl.DataFrame, theme: Theme) -> dict[Any, str]:
        names = names_in(frame, self.series)
        colours = [*(getattr(theme, name) for name in self.theme_colours), *theme.models]
        return dict(zip(names, colours, strict=False))

    def draw(self, frame: pl.DataFrame, style: Style) -> Any:
        heads = frame.partition_by(HEAD_COLUMNS, maintain_order=True)
        columns = columns_for(len(heads))
        style = replace(style, width=style.width / columns - (14 if columns > 1 else 0))
        cells = []
        for i, head in enumerate(heads):
            row = head.row(0, named=True)
            names = [row["model"], f"layer {row['layer']}, head {row['head']}"]
            title = self.y if i % columns == 0 else ""
            panels = [
                self._panel(head.filter(panel=panel), frame, style, title, f"zoom_{i}_{n}")
                for n, panel in enumerate(self.panel_titles)
            ]
            panels[0] += panel_title(names, style.width, style.theme)
            cell = alt.vconcat(*panels, spacing=22)
            cells.append(cell.resolve_scale(y="independent") if self.own_scale else cell)
        spacing: Any = {"row": 34, "column": 22}
        return alt.concat(*cells, columns=columns, spacing=spacing).resolve_scale(color="shared")

    def _panel(
        self, part: pl.DataFrame, frame: pl.DataFrame, style: Style, y_title: str, zoom: str
    ) -> Any:
        """Lines of `value` over `position`, the range of each bin, and the inserted tokens."""
        colour = self.colour(frame, style.theme, symbolType="stroke", symbolStrokeWidth=2.5)
        x = alt.X(
            "position:Q",
            title=self.panel_titles[part["panel"][0]],
            axis=alt.Axis(grid=False, format=",d", tickMinStep=1, labelFlush=True),
            scale=alt.Scale(
                domain=[min(part["position"]) - 0.5, max(part["last"]) + 0.5], nice=False
            ),
        )
        base, clip = chart_of(part).encode(x=x, color=colour), style.screen
        marks = self._span(part, clip)
        if (frame["position"] != frame["last"]).any():
            band = base.encode(y=alt.Y("min:Q", title=y_title), y2="max:Q")
            marks.append(band.mark_area(opacity=0.25, interpolate="step-after", clip=clip))
        shown = ["series", "position", "last", "token", "value", "min", "max", "tokens", "n"]
        y = alt.Y("value:Q", title=y_title, axis=alt.Axis(tickCount=5))
        value = base.encode(y=y, tooltip=tooltips(part, shown))
        marks.append(value.mark_line(strokeWidth=1.3, strokeJoin="round", clip=clip))
        if part.height <= 60 * part["series"].n_unique():
            marks.append(value.mark_point(size=9, filled=True, opacity=1, clip=clip))
        if clip:  # a selection belongs to one mark of a layer
            move = alt.selection_interval(name=zoom, bind="scales", encodings=["x"])
            # altair names a view by its encoding, so panels with other data would share a name.
            marks[-1] = marks[-1].add_params(move).properties(name=f"of_{zoom}")
        return alt.layer(*marks).properties(width=style.width, height=style.height)

    def _span(self, part: pl.DataFrame, clip: bool) -> list[Any]:
        """Shading of the inserted tokens, and its label above the panel."""
        inserted = part.filter(pl.col("role") == "filler")
        if inserted.is_empty() or inserted.height == part.height:
            return []
        first, last = min(inserted["position"]), max(inserted["position"])
        base = chart_of()
        ends = {"x": alt.XDatum(first - 0.5), "x2": alt.X2Datum(last + 0.5)}
        text: dict[str, Any] = {"style": "faint-text", "baseline": "bottom", "dy": -3}
        label = base.mark_text(text=self.span.format(f"{inserted['tokens'].sum():,}"), **text)
        return [
            base.mark_rect(style="span", clip=clip).encode(**ends),
            label.encode(x=alt.XDatum((first + last) / 2), y=alt.value(0)),
        ]
