"""A forest plot: a row per choice, with difference, interval and verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.shapes.shape import (
    TALLEST,
    Shape,
    chart_of,
    names_in,
    panel_title,
    tooltips,
    value_range,
)
from attnscope.figures.text_format import join
from attnscope.figures.theme import Style, Theme

VERDICTS = {
    "holds": "circle",
    "does not hold": "cross",
    "opposite": "triangle-down",
    "smaller than claimed": "square",
    "open": "diamond",
    "cannot tell": "M-1,-0.3H1V0.3H-1Z",
}
"""Verdict → shape of its point; the last one is a filled bar, as lines have no fill."""
SHOWN = ["panel", "choice", "quantity", "difference", "low", "high", "n", "q", "verdict"]


@dataclass(frozen=True, kw_only=True)
class Forest(Shape):
    """`difference` with `low` and `high` in a row per `choice`, a column per `quantity`, a block of
    rows per `panel`; colour and shape by `verdict`, and the row with `reference` shaded. `scale` is
    "ratio" or not.
    """

    value: str = "difference"
    bounds: Sequence[float] = ()
    """Further vertical lines."""
    rows_title: str = ""
    """The names of the choices that label the rows."""

    rank = 8
    intervals = ", drawn as bars"

    @property
    def split(self) -> list[str]:
        return ["quantity"]

    @property
    def drawn(self) -> str:
        return f"A forest plot: a row for each choice of {self.rows_title or 'normalisation'}"

    def axes(self, frame: pl.DataFrame) -> list[str]:
        bounds = join([f"{bound:g}" for bound in self.bounds])
        none = [f"; a line at {equal:g} is no difference" for equal in _equal(frame)]
        many = "lines at {} are bounds" if len(self.bounds) > 1 else "line at {} is what is needed"
        dashed = f"; the dashed {many.format(bounds)}" if self.bounds else ""
        return [
            f"x: {self.x_title or _kind(frame)}, with its 95 % interval{''.join(none)}{dashed}",
            f"y: {self.rows_title or 'where the claim was judged'}; the shaded row is the "
            "reference, which has the choices of the claim",
        ]

    def margin(self, frame: pl.DataFrame) -> float:
        return min(5.5 * max(len(text) for text in frame["choice"]), 400) + 20

    def width(self, frame: pl.DataFrame) -> float:
        return {1: 420, 2: 560, 3: 620}.get(frame["quantity"].n_unique(), 680)

    def draw(self, frame: pl.DataFrame, style: Style) -> Any:
        blocks, quantities = names_in(frame, "panel"), names_in(frame, "quantity")
        wide = (style.width - 22 * (len(quantities) - 1)) / len(quantities)
        tall = min(20.0, (TALLEST - 50 * len(blocks)) / frame.select("panel", "choice").n_unique())
        rows = []
        for block in blocks:
            part = frame.filter(pl.col("panel") == block)
            choices, cells = names_in(part, "choice"), []
            for name in quantities:
                first, last = name == quantities[0], block == blocks[-1]
                marks = self._cell(
                    part.filter(pl.col("quantity") == name),
                    _rows(choices, self.rows_title if block == blocks[0] else "", first, style),
                    (self.x_title or f"{name}: {_kind(frame)}") if last else "",
                    style.theme,
                )
                if first and len(blocks) > 1:
                    marks.append(panel_title([block], style.width, style.theme, rise=8))
                size = {"width": wide, "height": max(9.0, tall) * len(choices)}
                cells.append(alt.layer(*marks).properties(**size))
            beside = alt.hconcat(*cells, spacing=22, bounds="flush")
            rows.append(beside if len(cells) > 1 else cells[0])
        return alt.vconcat(*rows, spacing=22).resolve_scale(color="shared", shape="shared")

    def _cell(self, part: pl.DataFrame, y: alt.Y, x_title: str, theme: Theme) -> list[Any]:
        """One cell of the figure: the shaded row, the lines, intervals, points."""
        lines = [
            *((equal, [1, 0]) for equal in _equal(part)),
            *((bound, [4, 3]) for bound in self.bounds),
        ]
        ends = value_range(part, *(at for at, _ in lines), of=("difference", "low", "high"))
        edge = 0.06 * (ends[1] - ends[0]) or 0.5
        scale = alt.Scale(domain=[ends[0] - edge, ends[1] + edge], nice=False, zero=False)
        axis = alt.Axis(grid=True, tickCount=4, labelOverlap=True, format=".4~g")
        base = chart_of(part).encode(y=y, color=_verdicts(alt.Color, _colours(theme)))
        shade = chart_of(part).transform_filter(alt.datum.reference).encode(y=y)
        shade = shade.mark_bar(style="chosen-row", height=alt.RelativeBandSize(band=1))
        marks: list[Any] = [shade.encode(x=alt.value(0), x2=alt.value("width"))]
        for at, dash in lines:
            rule = chart_of().mark_rule(style="faint-rule", strokeDash=dash)
            marks.append(rule.encode(x=alt.XDatum(at)))
        if part["low"].null_count() < part.height:
            reach = {"x": alt.X("low:Q", title=x_title), "x2": "high:Q"}
            marks.append(base.mark_rule(strokeWidth=1.6, opacity=1).encode(**reach))
        point = base.mark_point(filled=True, size=46, opacity=1).encode(
            x=alt.X("difference:Q", title=x_title, scale=scale, axis=axis),
            shape=_verdicts(alt.Shape, list(VERDICTS.values())),
            tooltip=tooltips(part, SHOWN),
        )
        return [*marks, point]


def _kind(frame: pl.DataFrame) -> str:
    """What the numbers are: ratios, values, numbers of heads or layers, or differences."""
    kind: str = frame["scale"][0]
    return {"heads": "number of heads", "layers": "number of layers"}.get(kind, kind)


def _equal(frame: pl.DataFrame) -> list[float]:
    """The value that means no difference, if there is one."""
    return {"ratio": [1.0], "difference": [0.0]}.get(frame["scale"][0], [])


def _colours(theme: Theme) -> list[str]:
    """Colours of the verdicts, in the order of `VERDICTS`."""
    open_ = theme.class_colours(["other"])[0]
    return [theme.filled, *[theme.without] * 3, open_, open_]


def _rows(choices: Sequence[str], title: str, labelled: bool, style: Style) -> alt.Y:
    """The y axis of choices."""
    axis: dict[str, Any] = {"ticks": False, "domain": False, "grid": False, "labelOverlap": False}
    axis |= {"labels": labelled, "labelPadding": 8, "labelLimit": 420}
    axis |= {"titleAngle": 0, "titleAlign": "right", "titleAnchor": "start", "titleX": -8}
    axis |= {"titleY": -6, "titleBaseline": "bottom", "titleFontSize": style.theme.size - 1}
    return alt.Y(
        "choice:N",
        sort=list(choices),
        title=title if labelled and title else None,
        scale=alt.Scale(domain=list(choices), paddingInner=0, paddingOuter=0),
        axis=alt.Axis(**axis),
    )


def _verdicts(channel: Any, values: Sequence[str]) -> Any:
    """The colour or shape of a verdict, with one legend for both."""
    shown: dict[str, Any] = {"orient": "top", "title": "Verdict", "titleOrient": "left"}
    legend = alt.Legend(**shown, symbolOpacity=1, symbolSize=60, offset=24)
    scale = alt.Scale(domain=list(VERDICTS), range=list(values))
    return channel("verdict:N", scale=scale, legend=legend)
