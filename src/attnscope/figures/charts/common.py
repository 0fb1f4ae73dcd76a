"""Helpers of all charts: titles with captions, rows of panels, legends, tooltips.

Charts get plain values; altair computes no number.
"""

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.text_format import wrap
from attnscope.figures.theme import Style, Theme

CLASS_LABELS = {"hash": "# (hash)", "star": "* (star)", "slash": "/ (slash)"}
"""Legend labels of classes that are one character."""


def label_of(name: str) -> str:
    """The legend label of a class."""
    return CLASS_LABELS.get(name, name)


def empty_row() -> alt.InlineData:
    """One row without values, for marks with fixed coordinates."""
    return alt.InlineData(values=[{}])


def legend_of(names: Sequence[str], colours: Sequence[str]) -> list[str]:
    """A legend as text: the colour of each name."""
    return [f"{label_of(n)}: {colour}" for n, colour in zip(names, colours, strict=True)]


def series_legend(names: Sequence[str], theme: Theme) -> list[str]:
    """A legend as text for lines that are models, layers or conditions."""
    return [f"{n}: {c}" for n, c in zip(names, theme.series_colours(len(names)), strict=True)]


def rule_at(value: float, chart: Any = None) -> Any:
    """A dashed horizontal line; `chart` is the chart to use if it already has data."""
    rule = (chart or alt.Chart(empty_row())).mark_rule(style="faint-rule", strokeDash=[5, 3])
    return rule.encode(y=alt.YDatum(value))


def value_range(
    frame: pl.DataFrame, *also: float, of: Sequence[str] = ("value", "low", "high")
) -> list[float]:
    """Minimum and maximum of the columns and of the further values."""
    values = [*also]
    for column in of:
        values += [v for v in (frame[column].min(), frame[column].max()) if isinstance(v, float)]
    return [min(values), max(values)]


def tooltips(frame: pl.DataFrame, columns: Sequence[str]) -> list[alt.Tooltip]:
    """The tooltip: these columns of the frame, unchanged."""
    return [
        alt.Tooltip(
            field=c, type="quantitative" if frame.schema[c].is_float() else "nominal", title=c
        )
        for c in columns
        if c in frame.columns
    ]


def columns_for(panels: int, most: int = 4) -> int:
    """Number of panels per row, so that rows have nearly equal length."""
    if panels <= most:
        return max(panels, 1)
    rows = -(-panels // most)
    return -(-panels // rows)


def panel_title(lines: Sequence[str], width: float, theme: Theme, rise: float = 12) -> Any:
    """The title of a panel, wrapped to its width. It is a mark, so that all titles align."""
    text = [part for line in lines for part in wrap(line, width, (theme.size + 1) * 1.1)]
    leading = theme.size + 4
    return (
        alt.Chart(empty_row())
        .mark_text(
            style="panel-title",
            align="left",
            baseline="bottom",
            lineHeight=leading,
            dy=-rise - leading * (len(text) - 1),
            text=text,
            clip=False,
        )
        .encode(x=alt.value(0), y=alt.value(0))
    )


def panels(
    frame: pl.DataFrame,
    panel: str,
    marks: Callable[[pl.DataFrame, bool, float], list[Any]],
    style: Style,
    *,
    gap: float,
    titled: bool = True,
) -> Any:
    """A panel for each value of a column, at most three in a row.

    `marks` gets the data of a panel, whether it is the first of its row, and its width.
    """
    names = frame[panel].unique(maintain_order=True).to_list()
    columns = columns_for(len(names), 3)
    wide = style.width / columns - (gap if columns > 1 else 0)
    charts = []
    for i, name in enumerate(names):
        drawn = marks(frame.filter(pl.col(panel) == name), i % columns == 0, wide)
        if titled and len(names) > 1:
            drawn.append(panel_title([name], wide, style.theme))
        charts.append(alt.layer(*drawn).properties(width=wide, height=style.height))
    return alt.concat(*charts, columns=columns, spacing={"row": 26, "column": 26})


def to_spec(chart: Any) -> dict[str, Any]:
    """The chart as Vega-Lite with all rows.

    Frames become plain rows first. The row limit of altair for frames is a global setting, and
    changing it would affect other threads.
    """
    _with_rows(chart, {})
    spec: dict[str, Any] = chart.to_dict()
    return spec


def _with_rows(chart: Any, converted: dict[int, tuple[pl.DataFrame, alt.InlineData]]) -> None:
    """Replace the frames of a chart and of its inner charts by plain rows."""
    data = getattr(chart, "data", None)
    if isinstance(data, pl.DataFrame):
        if id(data) not in converted:
            converted[id(data)] = (data, alt.InlineData(values=data.to_dicts()))
        _, chart.data = converted[id(data)]
    for name in ("layer", "concat", "hconcat", "vconcat", "spec"):
        inner = getattr(chart, name, alt.Undefined)
        for one in inner if isinstance(inner, list) else [inner]:
            if isinstance(one, alt.TopLevelMixin):
                _with_rows(one, converted)


def figure_spec(
    chart: Any, *, title: str, caption: str, alt_text: str, width: float, theme: Theme
) -> dict[str, Any]:
    """The figure as Vega-Lite: chart, title, caption, description, theme."""
    width = max(width, 400)
    titled = chart.properties(
        title=alt.TitleParams(
            text=wrap(title, width, (theme.size + 3) * 1.08),
            subtitle=wrap(caption, width, theme.size - 1) if caption else [],
        ),
        description=alt_text,
    )
    spec = to_spec(titled)
    spec["config"] = theme.config()
    return spec
