"""Draws grouped bars: stacked if the parts add up, else side by side."""

from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.charts.common import CLASS_LABELS, rule_at, tooltips
from attnscope.figures.theme import Style


def bars_width(models: Sequence[str], layers: Sequence[int]) -> float:
    """Width in pixels for the number of bars."""
    many = len(models) * len(layers)
    return min(720, max(10 * many, 64 * many if many < 6 else 52 * many))


def bars(
    frame: pl.DataFrame,
    style: Style,
    *,
    whiskers: str = "total",
    counts: bool = False,
    uniform: bool = False,
    stacked: bool = True,
    rule: float | None = None,
    y_title: str = "Total attention (sum)",
) -> alt.FacetChart:
    """A group of bars per `layer`, in it a bar per `model`, made of a part per `class`.

    Columns: `model`, `layer`, `class` (or "total"), `bottom`, `top`; for whiskers `whisker_low`
    and `whisker_high`, for counts `tokens` and `bar` (end of a bar), for the baseline
    `uniform`. Unless `stacked`, classes are side by side; `rule` is a horizontal line.
    """
    theme = style.theme
    models = frame["model"].unique(maintain_order=True).to_list()
    layers = frame["layer"].unique(maintain_order=True).to_list()
    names = [c for c in frame["class"].unique(maintain_order=True) if c != "total"]
    step = style.width / len(layers) / len(models)
    bar = max(3.0, step * 0.72)
    x = _models(models, step, theme.size)
    side: dict[str, Any] = {"x": x}
    if not stacked:
        side["xOffset"] = alt.XOffset("class:N", sort=names)
        bar = max(2.0, bar / len(names) * 0.8)
    colour = _colour(names, style)
    y = alt.Y("bottom:Q", title=y_title, axis=alt.Axis(tickCount=6))
    shown = ["model", "layer", "class", "value", "low", "high", "n", "tokens", "uniform"]
    marks: list[Any] = [
        alt.Chart()
        .transform_filter(alt.datum["class"] != "total")
        .mark_bar(size=bar)
        .encode(**side, y=y, y2="top:Q", color=colour, tooltip=tooltips(frame, shown))
    ]
    if uniform:
        marks.append(
            alt.Chart()
            .transform_filter(alt.datum["class"] == "total")
            .mark_tick(style="ink", thickness=1, size=min(step, bar * 1.2), opacity=1)
            .encode(x=x, y=alt.Y("uniform:Q"))
        )
    if rule is not None:
        marks.append(rule_at(rule, alt.Chart()))
    which = {"none": [], "total": ["total"], "classes": names}[whiskers]
    for i, name in enumerate(which):
        shift = (i - (len(which) - 1) / 2) * bar / (len(which) + 1) if stacked else 0.0
        marks += _whiskers(name, side, shift, bar)
    if counts:
        marks += _counts(names, x, colour, theme.size)
    return (
        alt.layer(*marks, data=frame)
        .properties(width=step * len(models), height=style.height)
        .facet(
            column=_groups(layers, step * len(models), theme.size),
            spacing=max(2, min(14, step / 3)),
        )
    )


def _models(models: Sequence[str], step: float, size: float) -> alt.X:
    """The models of a group; names that do not fit are rotated."""
    turned = max(len(m) for m in models) * size * 0.56 > step
    steep = step < 2.2 * size
    angle = (-90 if steep else -35) if turned else 0
    axis = alt.Axis(labelAngle=angle, ticks=False, labelPadding=5)
    scale = alt.Scale(paddingInner=0.28, paddingOuter=0.28)
    return alt.X("model:N", sort=list(models), title=None, axis=axis, scale=scale)


def _groups(layers: Sequence[int], wide: float, size: float) -> alt.Column:
    """A group per layer, labelled "Layer 27", or "27" if there is no space."""
    roomy = wide > 5 * size
    label = "'Layer ' + datum.value" if roomy else "datum.value"
    header = alt.Header(labelOrient="bottom", titleOrient="bottom", labelExpr=label, labelPadding=6)
    title = None if roomy else "Layer"
    return alt.Column("layer:O", sort=list(layers), title=title, header=header)


def _colour(names: Sequence[str], style: Style) -> alt.Color:
    labels = {k: v for k, v in CLASS_LABELS.items() if k in names}
    label = f"({labels})[datum.label] || datum.label"
    scale = alt.Scale(domain=list(names), range=style.theme.class_colours(names))
    legend = alt.Legend(orient="top", title=None, symbolType="square", labelExpr=label)
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


def _counts(names: Sequence[str], x: alt.X, colour: alt.Color, size: float) -> list[Any]:
    """Numbers of tokens above the bars, a line per class."""
    return [
        alt.Chart()
        .transform_filter(alt.datum["class"] == name)
        .mark_text(dy=-8 - line * (size - 0.5), fontSize=size - 1, fontWeight="bold")
        .encode(x=x, y=alt.Y("bar:Q"), text=alt.Text("tokens:Q", format=".3~r"), color=colour)
        for line, name in enumerate(reversed(names))
    ]
