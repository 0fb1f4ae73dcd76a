"""Dots with intervals: side by side over categories, or heads in the order of their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.shapes.matrix import Matrix
from attnscope.figures.shapes.shape import (
    Shape,
    chart_of,
    names_in,
    rule_at,
    text_mark,
    value_range,
)
from attnscope.figures.text_format import DIGITS
from attnscope.figures.theme import Style, Theme

NAMED = 3
"""Number of heads of a strip that are named."""
FEW_LAYERS = 12
"""Largest number of layers that each have a symbol in the legend."""
FEW = 96
"""Largest number of heads in a panel that are drawn with intervals."""


@dataclass(frozen=True, kw_only=True)
class Dots(Shape):
    """`value` with `low` and `high` over the categories of `x`, `series` side by side."""

    series: str = "series"
    many: Matrix | None = None
    """For heads, which are many: the shape for more than 96 dots in a panel. Its `differs` marks
    heads whose interval excludes the dashed line."""

    rank = 2
    intervals = ", drawn as bars"
    drawn = "Dots side by side"

    @property
    def order(self) -> list[str]:
        return [self.panel, self.x, self.series]

    def for_data(self, frame: pl.DataFrame) -> Shape:
        most = max(part.height for part in self.parts(frame))
        return self if self.many is None or most <= FEW else self.many

    def arrange(self, frame: pl.DataFrame) -> pl.DataFrame:
        if self.many is None:
            return frame
        outside = (pl.col("low") > self.rule) | (pl.col("high") < self.rule)
        return frame.with_columns(outside.fill_null(False).alias("differs"))

    def ranked(self, frame: pl.DataFrame) -> str | None:
        return None if self.many else self.x

    def draw(self, frame: pl.DataFrame, style: Style) -> Any:
        intervals = self.interval(frame) is not None
        columns = ("value", "low", "high") if intervals else ("value",)
        scale = alt.Scale(domain=value_range(frame, self.rule, of=columns), nice=True, zero=False)
        colour = self._colour(frame, style.theme)

        def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
            base = chart_of(part).encode(**self._across(frame, part, width), color=colour)
            title, drawn = self.y if first else "", rule_at(self.rule)
            if intervals:
                reach = {"y": alt.Y("low:Q", title=title, scale=scale), "y2": "high:Q"}
                drawn.append(base.mark_rule(strokeWidth=1.3).encode(**reach))
            y = alt.Y("value:Q", title=title, scale=scale, axis=alt.Axis(grid=True))
            size = max(5.0, min(36.0, (0.9 * width / part.height) ** 2))
            point = base.mark_point(filled=True, size=size, opacity=1)
            tip = self.tooltip(part, "layer", "head")
            return [*drawn, point.encode(y=y, tooltip=tip), *self._first(part, width)]

        return self.panels(frame, marks, style)

    def _across(self, frame: pl.DataFrame, part: pl.DataFrame, width: float) -> dict[str, Any]:
        """The categories, and in each the series side by side."""
        order, series, title = names_in(part, self.x), names_in(frame, self.series), self.x_title
        title = title if isinstance(title, str) else title.get(part[self.panel][0], "")
        if self.many and frame[self.x].n_unique() == 1:
            title = f"{self.series.capitalize()} of {self.x} {order[0]}"
            return {"x": alt.X(f"{self.series}:O", title=title, axis=alt.Axis(labelAngle=0))}
        flat = 6 * max(len(str(name)) for name in order) * len(order) < width
        axis = alt.Axis(labelAngle=0 if flat else -45, grid=False, labelLimit=200)
        x = {"x": alt.X(f"{self.x}:O", sort=order, title=title, axis=axis)}
        if len(series) == 1:  # the offset of a single series would not be 0
            return x
        kind = "N" if frame.schema[self.series] == pl.String else "O"
        return {**x, "xOffset": alt.XOffset(f"{self.series}:{kind}", sort=series)}

    def _colour(self, frame: pl.DataFrame, theme: Theme) -> Any:
        if self.many or frame[self.series].n_unique() == 1:
            return alt.value(theme.filled)
        return self.colour(frame, theme, columns=4, labelLimit=400)

    def _first(self, part: pl.DataFrame, width: float) -> list[Any]:
        """The names of the first heads, above a panel."""
        return []


@dataclass(frozen=True, kw_only=True)
class Strip(Dots):
    """Heads over `rank`, coloured by `layer`, a panel per `panel`, the first heads named.

    Intervals are drawn for few heads.
    """

    series: str = ""
    x: str = "rank"
    x_title: str = "Head, by rank"

    rank = 4
    drawn = "Every head as a dot, from the largest value to the smallest"

    @property
    def order(self) -> list[str]:
        return [self.panel, "layer", "head"]

    def arrange(self, frame: pl.DataFrame) -> pl.DataFrame:
        # Heads whose shown values are equal keep their order.
        shown = pl.col("value").round_sig_figs(DIGITS)
        parts = [
            part.sort(shown, descending=True, nulls_last=True, maintain_order=True)
            for part in frame.partition_by(self.panel, maintain_order=True)
        ]
        name, rank = pl.format("L{} H{}", "layer", "head"), pl.int_range(pl.len()).over(self.panel)
        ranked = pl.concat(parts).with_columns(rank=rank, name=name)
        first = [self.panel, "rank", "name", "layer", "head"]
        return ranked.select(*first, pl.exclude(first))

    def ranked(self, frame: pl.DataFrame) -> str | None:
        return None

    def interval(self, frame: pl.DataFrame) -> str | None:
        return super().interval(frame) if max(frame["rank"]) < FEW else None

    def _across(self, frame: pl.DataFrame, part: pl.DataFrame, width: float) -> dict[str, Any]:
        most = max(frame["rank"])
        scale = alt.Scale(domain=[-0.02 * most - 0.5, most + 0.5], nice=False)
        axis = alt.Axis(grid=False, tickMinStep=1)
        return {"x": alt.X("rank:Q", title=self.x_title, axis=axis, scale=scale)}

    def _colour(self, frame: pl.DataFrame, theme: Theme) -> Any:
        layers = [min(frame["layer"]), max(frame["layer"])]
        ends = [theme.diverging[0], theme.diverging[-1]]
        scale = alt.Scale(domain=layers, range=ends, interpolate="rgb")
        shown: dict[str, Any] = {"orient": "top", "title": "Layer", "titleOrient": "left"}
        if frame["layer"].n_unique() <= FEW_LAYERS:  # a symbol for each, not for round numbers
            shown["values"] = sorted(set(frame["layer"]))
        return alt.Color("layer:Q", scale=scale, legend=alt.Legend(**shown, format="d"))

    def _first(self, part: pl.DataFrame, width: float) -> list[Any]:
        names = " · ".join(part.sort("rank")["name"][:NAMED])
        mark: dict[str, Any] = {"style": "faint-text", "align": "right", "baseline": "bottom"}
        text = text_mark([f"first: {names}"], **mark, dy=-6)
        return [text.encode(x=alt.value(width), y=alt.value(0))]
