"""Draws profiles over positions: two panels per head, with bins and the inserted span."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.charts.common import columns_for, empty_row, panel_title, tooltips
from attnscope.figures.theme import Style

Y_TITLE = "Average attention weight"


def profile_pairs(
    frame: pl.DataFrame,
    style: Style,
    *,
    colours: Mapping[str, str],
    panels: Mapping[str, str],
    span: str,
    own_scale: bool = False,
    count_from: int = 0,
) -> Any:
    """Two panels per `model`, `layer` and `head`: the first above, the full sequence below.

    Columns: `model`, `layer`, `head`, `panel`, `series`, `position`, `last`, `value`, `min`, `max`,
    `role`, `tokens`. `panels` gives the two their x titles, `span` is written over the inserted
    tokens (`{}`: how many).
    """
    groups = frame.partition_by(["model", "layer", "head"], maintain_order=True)
    columns = columns_for(len(groups))
    wide = style.width / columns - (14 if columns > 1 else 0)
    bins = bool((frame["position"] != frame["last"]).any())
    above, below = panels
    cells = []
    for i, group in enumerate(groups):
        row = group.row(0, named=True)
        head = f"layer {row['layer'] + count_from}, head {row['head'] + count_from}"
        sequence = group.filter(pl.col("panel") == below)
        shared: dict[str, Any] = {
            "width": wide,
            "height": style.height,
            "y_title": Y_TITLE if i % columns == 0 else "",
            "binned": bins,
        }
        upper = _panel(
            group.filter(pl.col("panel") == above),
            colours,
            x_title=panels[above],
            zoom=f"zoom_{i}" if style.screen else None,
            also=[panel_title([row["model"], head], wide, style.theme)],
            **shared,
        )
        lower = _panel(
            sequence,
            colours,
            x_title=panels[below],
            spans=_span(sequence, span),
            brush=f"brush_{i}" if style.screen else None,
            **shared,
        )
        cell = alt.vconcat(upper, lower, spacing=22)
        cells.append(cell.resolve_scale(y="independent") if own_scale else cell)
    return alt.concat(*cells, columns=columns, spacing={"row": 34, "column": 22}).resolve_scale(
        color="shared"
    )


def _span(frame: pl.DataFrame, label: str) -> list[tuple[int, int, str]]:
    """First and last position of the inserted tokens, and their label."""
    inserted = frame.filter(pl.col("role") == "filler")
    if inserted.is_empty():
        return []
    text = label.format(f"{inserted['tokens'].sum():,}")
    return [(min(inserted["position"]), max(inserted["position"]), text)]


def _panel(
    frame: pl.DataFrame,
    colours: Mapping[str, str],
    *,
    width: float,
    height: float,
    x_title: str,
    y_title: str,
    binned: bool,
    spans: Sequence[tuple[int, int, str]] = (),
    also: Sequence[Any] = (),
    zoom: str | None = None,
    brush: str | None = None,
) -> Any:
    """Lines of `value` over `position`, one per `series`; with bins also the range of each.

    `spans` are shaded and labelled above the panel. `zoom` (a name) lets the wheel and a drag move
    along the positions; `brush` (a name) adds an overview below, where readers select a range.
    """
    colour = alt.Color(
        "series:N",
        scale=alt.Scale(domain=list(colours), range=list(colours.values())),
        legend=alt.Legend(
            orient="top", title=None, symbolType="stroke", symbolStrokeWidth=2.5, symbolOpacity=1
        ),
    )
    domain: Any = [min(frame["position"]) - 0.5, max(frame["last"]) + 0.5]
    picked = alt.selection_interval(name=brush, encodings=["x"]) if brush else None
    moving = bool(zoom or brush)
    marks = _lines(
        frame,
        x=alt.X(
            "position:Q",
            title=x_title,
            axis=alt.Axis(grid=False, format=",d", tickMinStep=1, labelFlush=True),
            scale=alt.Scale(domain=picked if picked is not None else domain, nice=False),
        ),
        y_title=y_title,
        colour=colour,
        binned=binned,
        moving=moving,
    )
    shades, labels = _shaded(spans, moving)
    panel = alt.layer(*shades, *marks, *labels, *also).properties(width=width, height=height)
    if picked is not None:
        return alt.vconcat(panel, _overview(frame, domain, colour, width, picked), spacing=6)
    if zoom:
        panel = panel.add_params(alt.selection_interval(name=zoom, bind="scales", encodings=["x"]))
    return panel


def _lines(
    frame: pl.DataFrame, *, x: alt.X, y_title: str, colour: alt.Color, binned: bool, moving: bool
) -> list[Any]:
    base = alt.Chart(frame)
    y = alt.Y("value:Q", title=y_title, axis=alt.Axis(tickCount=5))
    marks: list[Any] = []
    if binned:
        band = base.mark_area(opacity=0.25, interpolate="step-after", clip=moving)
        marks.append(band.encode(x=x, y=alt.Y("min:Q", title=y_title), y2="max:Q", color=colour))
    shown = ["series", "position", "last", "token", "value", "min", "max", "tokens", "n"]
    line = base.mark_line(strokeWidth=1.3, strokeJoin="round", clip=moving)
    marks.append(line.encode(x=x, y=y, color=colour, tooltip=tooltips(frame, shown)))
    if frame.height <= 60 * max(frame["series"].n_unique(), 1):
        points = base.mark_point(size=9, filled=True, opacity=1, clip=moving)
        marks.append(points.encode(x=x, y=y, color=colour))
    return marks


def _shaded(spans: Sequence[tuple[int, int, str]], moving: bool) -> tuple[list[Any], list[Any]]:
    """Shading of the spans, and their labels above the panel."""
    shades = [
        alt.Chart(empty_row())
        .mark_rect(style="span", clip=moving)
        .encode(x=alt.XDatum(start - 0.5), x2=alt.X2Datum(end + 0.5))
        for start, end, _ in spans
    ]
    labels = [
        alt.Chart(empty_row())
        .mark_text(style="faint-text", baseline="bottom", dy=-3, text=label, clip=False)
        .encode(x=alt.XDatum((start + end) / 2), y=alt.value(0))
        for start, end, label in spans
    ]
    return shades, labels


def _overview(
    frame: pl.DataFrame, domain: Any, colour: alt.Color, width: float, picked: Any
) -> Any:
    """The overview below a panel, where readers select a range."""
    x = alt.X(
        "position:Q",
        title="drag here to zoom in",
        axis=alt.Axis(grid=False, format=",d", tickMinStep=1),
        scale=alt.Scale(domain=domain, nice=False),
    )
    line = alt.Chart(frame).mark_line(strokeWidth=0.8)
    drawn = line.encode(x=x, y=alt.Y("value:Q", title=None, axis=None), color=colour)
    return drawn.properties(width=width, height=36).add_params(picked)
