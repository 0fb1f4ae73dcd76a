"""Grouped bars: stacked if the parts add up, else side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.shapes.shape import LABEL, Shape, names_in, rows_of, rule_at, tooltips
from attnscope.figures.theme import Style, Theme

TOTAL = "total"
"""The class of a whole bar."""
FEW = 8
"""Beyond this number of layers the bars are thin, and lines come before them in a report."""


@dataclass(frozen=True, kw_only=True)
class Bars(Shape):
    """A group of bars per `layer`, in it a bar per `model`, made of a part per `class`."""

    whiskers: str = TOTAL
    """Intervals on the `total` of a bar, on its `classes`, or `none`."""
    uniform: bool = False
    """Whether a line shows the total under uniform attention."""
    stacked: bool = True
    series: str = "model"
    x: str = "layer"
    x_title: str = "Layer"
    y: str = "Total attention (sum)"

    @property
    def drawn(self) -> str:
        how = "stacked in the order of the legend" if self.stacked else "side by side"
        return f"Bars in groups by layer, the classes {how}"

    @property
    def order(self) -> list[str]:
        return ["layer", "model", "class"]

    @property
    def split(self) -> list[str]:
        return []

    def rank_for(self, frame: pl.DataFrame) -> int:
        return 0 if frame["layer"].n_unique() <= FEW else 2

    def arrange(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The start and the end of each part of a bar; the first class is on top of the stack."""
        top = pl.col("value")
        if self.stacked:
            is_total = pl.col("class") == TOTAL
            part = pl.when(~is_total).then(pl.col("value"))
            height = part.cum_sum(reverse=True).over("model", "layer")
            top = pl.when(is_total).then(pl.col("value")).otherwise(height)
        frame = frame.with_columns(top.alias("top"))
        frame = frame.with_columns((pl.col("top") - pl.col("value")).alias("bottom"))
        ends, highest = [], ["top"]
        if self.whiskers != "none" and frame["low"].null_count() < frame.height:
            low, high = (pl.col("bottom") + pl.col(end) for end in ("low", "high"))
            frame = frame.with_columns(whisker_low=low, whisker_high=high)
            ends, highest = ["whisker_low", "whisker_high"], ["top", "whisker_high"]
        bar = pl.max_horizontal(highest).max().over("model", "layer").alias("bar")
        columns = ["model", "layer", "class", "value", "low", "high", "n", "tokens", "uniform"]
        return frame.select(*columns, "bottom", "top", *ends, bar)

    def ranked(self, frame: pl.DataFrame) -> str | None:
        return "class"

    def interval(self, frame: pl.DataFrame) -> str | None:
        if "whisker_low" not in frame.columns:
            return None
        on = "each class" if self.whiskers == "classes" else "the total of a bar"
        return f", drawn as whiskers on {on}"

    def width(self, frame: pl.DataFrame) -> float:
        many = frame["model"].n_unique() * frame["layer"].n_unique()
        return min(720, max(10 * many, 64 * many if many < 6 else 52 * many))

    def draw(self, frame: pl.DataFrame, style: Style) -> Any:
        size, models, layers = style.theme.size, names_in(frame, "model"), names_in(frame, "layer")
        names = [name for name in names_in(frame, "class") if name != TOTAL]
        step = style.width / len(layers) / len(models)
        bar = max(3.0, step * 0.72)
        x = _models(models, step, size)
        side: dict[str, Any] = {"x": x}
        if not self.stacked:
            side["xOffset"] = alt.XOffset("class:N", sort=names)
            bar = max(2.0, bar / len(names) * 0.8)
        y = alt.Y("bottom:Q", title=self.y, axis=alt.Axis(tickCount=6))
        shown = ["model", "layer", "class", "value", "low", "high", "n", "tokens", "uniform"]
        parts = alt.Chart().transform_filter(alt.datum["class"] != TOTAL).mark_bar(size=bar)
        tip, colour = tooltips(frame, shown), _colour(names, style.theme)
        marks: list[Any] = [parts.encode(**side, y=y, y2="top:Q", color=colour, tooltip=tip)]
        if self.uniform:
            totals = alt.Chart().transform_filter(alt.datum["class"] == TOTAL)
            tick = totals.mark_tick(style="ink", thickness=1, size=min(step, bar * 1.2), opacity=1)
            marks.append(tick.encode(x=x, y=alt.Y("uniform:Q")))
        marks += rule_at(self.rule, alt.Chart())
        which = {"none": [], TOTAL: [TOTAL], "classes": names}[self.whiskers]
        for i, name in enumerate(which if "whisker_low" in frame.columns else []):
            shift = (i - (len(which) - 1) / 2) * bar / (len(which) + 1) if self.stacked else 0.0
            marks += _whiskers(name, side, shift, bar)
        wide = step * len(models)
        chart = alt.layer(*marks, data=rows_of(frame)).properties(width=wide, height=style.height)
        return chart.facet(column=_groups(layers, wide, size), spacing=max(2, min(14, step / 3)))


def _models(models: Sequence[str], step: float, size: float) -> alt.X:
    """The models of a group; names that do not fit are rotated."""
    turned = max(len(m) for m in models) * size * 0.56 > step
    angle = (-90 if step < 2.2 * size else -35) if turned else 0
    axis = alt.Axis(labels=len(models) > 1, labelAngle=angle, ticks=False, labelPadding=5)
    scale = alt.Scale(paddingInner=0.28, paddingOuter=0.28)
    return alt.X("model:N", sort=list(models), title=None, axis=axis, scale=scale)


def _groups(layers: Sequence[int], wide: float, size: float) -> alt.Column:
    """A group per layer, labelled "Layer 27", or "27" if there is no space."""
    roomy = wide > 5 * size
    label = "'Layer ' + datum.value" if roomy else "datum.value"
    header = alt.Header(labelOrient="bottom", titleOrient="bottom", labelExpr=label, labelPadding=6)
    title = None if roomy else "Layer"
    return alt.Column("layer:O", sort=list(layers), title=title, header=header)


def _colour(names: Sequence[str], theme: Theme) -> alt.Color:
    scale = alt.Scale(domain=list(names), range=theme.class_colours(names))
    legend = alt.Legend(orient="top", title=None, symbolType="square", labelExpr=LABEL, columns=6)
    return alt.Color("class:N", scale=scale, legend=legend)


def _whiskers(name: str, side: dict[str, Any], shift: float, bar: float) -> list[Any]:
    base = alt.Chart().transform_filter(alt.datum["class"] == name)
    ends = ("whisker_low:Q", "whisker_high:Q")
    line = base.mark_rule(style="ink", strokeWidth=1.2, xOffset=shift)
    tick = base.mark_tick(style="ink", thickness=1, size=min(8, bar / 3), xOffset=shift, opacity=1)
    return [
        line.encode(**side, y=alt.Y(ends[0]), y2="whisker_high:Q"),
        *(tick.encode(**side, y=alt.Y(end)) for end in ends),
    ]
