"""Draws a forest plot: a row per choice, with difference, interval and verdict."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.charts.common import empty_row, panel_title, tooltips, value_range
from attnscope.figures.theme import Style, Theme

SHAPES = {"supported": "circle", "contradicted": "cross", "undetermined": "diamond"}


def verdict_colours(theme: Theme) -> list[str]:
    """Colours of the verdicts, in the order of `SHAPES`."""
    return [theme.filled, theme.without, theme.class_colours(["other"])[0]]


def forest(
    frame: pl.DataFrame,
    style: Style,
    *,
    bounds: Sequence[float] = (),
    x_title: str | None = None,
    rows_title: str = "",
) -> Any:
    """`difference` with `low` and `high` in a row per `choice`, a column per `quantity`, a block of
    rows per `panel`; colour and shape by `verdict`, and the row with `reference` shaded. `scale` is
    "ratio" or not; `bounds` are further vertical lines.
    """
    blocks = frame["panel"].unique(maintain_order=True).to_list()
    quantities = frame["quantity"].unique(maintain_order=True).to_list()
    wide = (style.width - 22 * (len(quantities) - 1)) / len(quantities)
    equal = 1.0 if frame["scale"][0] == "ratio" else 0.0
    rows = []
    for block in blocks:
        part = frame.filter(pl.col("panel") == block)
        order = part["choice"].unique(maintain_order=True).to_list()
        cells = []
        for name in quantities:
            first = name == quantities[0]
            title = (x_title or f"{name}: difference") if block == blocks[-1] else ""
            marks = _cell(
                part.filter(pl.col("quantity") == name),
                y=_rows(part, order, first, rows_title if block == blocks[0] else "", style.theme),
                lines=[(equal, False), *((bound, True) for bound in bounds)],
                x_title=title,
                ticks=5 if len(quantities) == 1 else 3,
                encodings=_verdicts(style.theme, gap=24 if len(blocks) > 1 else 6),
            )
            if first and len(blocks) > 1:
                marks.append(panel_title([block], style.width, style.theme, rise=8))
            cells.append(alt.layer(*marks).properties(width=wide, height=_step(part) * len(order)))
        rows.append(alt.hconcat(*cells, spacing=22, bounds="flush") if len(cells) > 1 else cells[0])
    return alt.vconcat(*rows, spacing=22).resolve_scale(color="shared", shape="shared")


def _step(part: pl.DataFrame) -> float:
    """Height of a row in pixels: enough for a line of text and for every head."""
    heads = part["head"].n_unique() if "head" in part.columns else 1
    return max(20.0 if part["choice"].n_unique() <= 8 else 15.0, 2.2 * heads + 4)


def _rows(
    part: pl.DataFrame, order: Sequence[str], labelled: bool, title: str, theme: Theme
) -> alt.Y:
    """The y axis of choices, with the reference in bold."""
    bold = part.filter("reference")["choice"].to_list()
    weight: Any = alt.Undefined
    if bold:
        test = f"indexof({json.dumps(list(dict.fromkeys(bold)))}, datum.value) >= 0"
        weight = {"condition": {"test": test, "value": "bold"}, "value": "normal"}
    placed: dict[str, Any] = {
        "titleAngle": 0,
        "titleAlign": "right",
        "titleAnchor": "start",
        "titleX": -8,
    }
    placed |= {"titleY": -6, "titleBaseline": "bottom", "titleFontSize": theme.size - 1}
    bare: dict[str, Any] = {"ticks": False, "domain": False, "grid": False, "labelOverlap": False}
    labels: dict[str, Any] = {
        "labels": labelled,
        "labelFontWeight": weight,
        "labelPadding": 8,
        "labelLimit": 420,
    }
    return alt.Y(
        "choice:N",
        sort=list(order),
        title=title if labelled and title else None,
        scale=alt.Scale(domain=list(order), paddingInner=0, paddingOuter=0),
        axis=alt.Axis(**labels, **bare, **placed),
    )


def _verdicts(theme: Theme, gap: float) -> Mapping[str, Any]:
    """The colour and shape encodings of verdicts."""
    legend = alt.Legend(
        orient="top",
        title="Verdict",
        titleOrient="left",
        symbolOpacity=1,
        symbolSize=60,
        offset=gap,
    )
    colours = alt.Scale(domain=list(SHAPES), range=verdict_colours(theme))
    shapes = alt.Scale(domain=list(SHAPES), range=list(SHAPES.values()))
    return {
        "color": alt.Color("verdict:N", scale=colours, legend=legend),
        "shape": alt.Shape("verdict:N", scale=shapes, legend=legend),
    }


def _cell(
    part: pl.DataFrame,
    *,
    y: alt.Y,
    lines: Sequence[tuple[float, bool]],
    x_title: str,
    ticks: int,
    encodings: Mapping[str, Any],
) -> list[Any]:
    """One cell of the figure: the shaded row, the lines, intervals, points."""
    low, high = value_range(part, *(at for at, _ in lines), of=("difference", "low", "high"))
    edge = 0.06 * (high - low) or 0.5
    x = alt.X(
        "difference:Q",
        title=x_title,
        scale=alt.Scale(domain=[low - edge, high + edge], nice=False, zero=False),
        axis=alt.Axis(grid=True, tickCount=ticks, labelOverlap=True, format="~g"),
    )
    base = alt.Chart(part)
    placed: dict[str, Any] = {"y": y}
    many = "head" in part.columns and part["head"].n_unique() > 1
    if many:
        placed["yOffset"] = alt.YOffset("head:O", scale=alt.Scale(paddingOuter=0.5))
    marks: list[Any] = [
        base.transform_filter(alt.datum.reference)
        .mark_bar(style="chosen-row", height=alt.RelativeBandSize(band=1))
        .encode(y=y, x=alt.value(0), x2=alt.value("width"))
    ]
    for at, dashed in lines:
        rule = alt.Chart(empty_row()).mark_rule(
            style="faint-rule", strokeDash=[4, 3] if dashed else [1, 0]
        )
        marks.append(rule.encode(x=alt.XDatum(at)))
    if part["low"].null_count() < part.height:
        interval = base.mark_rule(strokeWidth=1 if many else 1.6, opacity=1)
        ends = {"x": alt.X("low:Q", title=x_title), "x2": "high:Q"}
        marks.append(interval.encode(**ends, color=encodings["color"], **placed))
    columns = ["panel", "queries", "keys", "classes", "normalise", "condition", "head", "quantity"]
    tip = tooltips(part, [*columns, "difference", "low", "high", "n", "q", "verdict"])
    point = base.mark_point(filled=True, size=9 if many else 46, opacity=1)
    return [*marks, point.encode(x=x, tooltip=tip, **encodings, **placed)]
