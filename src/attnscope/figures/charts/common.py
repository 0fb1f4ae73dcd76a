"""The parts that charts share: titles with captions, rows of panels, legends, tooltips.

Charts get their rows as plain values: altair changes no number. This module must not know runs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.text_format import wrap
from attnscope.figures.theme import Style, Theme

CLASS_LABELS = {"hash": "# (hash)", "star": "* (star)", "slash": "/ (slash)"}
"""How classes that are one character are called in legends."""


def label_of(name: str) -> str:
    """A class as a legend calls it."""
    return CLASS_LABELS.get(name, name)


def empty_row() -> alt.InlineData:
    """One row without a value, for marks that stand at given places."""
    return alt.InlineData(values=[{}])


def legend_of(names: Sequence[str], colours: Sequence[str]) -> list[str]:
    """A legend in words: what has which colour."""
    return [f"{label_of(n)}: {colour}" for n, colour in zip(names, colours, strict=True)]


def series_legend(names: Sequence[str], theme: Theme) -> list[str]:
    """The same of lines that are models, layers or conditions."""
    return [f"{n}: {c}" for n, c in zip(names, theme.series_colours(len(names)), strict=True)]


def rule_at(value: float, chart: Any = None) -> Any:
    """A dashed line across a panel; of a chart that has its data already, if one is given."""
    rule = (chart or alt.Chart(empty_row())).mark_rule(style="faint-rule", strokeDash=[5, 3])
    return rule.encode(y=alt.YDatum(value))


def value_range(
    frame: pl.DataFrame, *also: float, of: Sequence[str] = ("value", "low", "high")
) -> list[float]:
    """From the least to the most of values and intervals, and of what else must be seen."""
    values = [*also]
    for column in of:
        values += [v for v in (frame[column].min(), frame[column].max()) if isinstance(v, float)]
    return [min(values), max(values)]


def tooltips(frame: pl.DataFrame, columns: Sequence[str]) -> list[alt.Tooltip]:
    """What stands in the box under the pointer: these columns of the frame, as they are."""
    return [
        alt.Tooltip(
            field=c, type="quantitative" if frame.schema[c].is_float() else "nominal", title=c
        )
        for c in columns
        if c in frame.columns
    ]


def columns_for(panels: int, most: int = 4) -> int:
    """How many panels stand in a row: all of few, else rows of nearly equal length."""
    if panels <= most:
        return max(panels, 1)
    rows = -(-panels // most)
    return -(-panels // rows)


def panel_title(lines: Sequence[str], width: float, theme: Theme, rise: float = 12) -> Any:
    """A panel's title, broken where the panel ends: a mark of its own, so that all stand level."""
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
    """A panel for each value of a column, at most three in a row. `marks` gets the rows of a panel,
    whether it is the first of its row, and its width.
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
    """The chart as Vega-Lite, with all rows. Frames become plain rows first: altair's limit of rows
    for frames is a global setting, which another thread may be reading."""
    _with_rows(chart, {})
    spec: dict[str, Any] = chart.to_dict()
    return spec


def _with_rows(chart: Any, converted: dict[int, tuple[pl.DataFrame, alt.InlineData]]) -> None:
    """Put rows in the place of the frames of a chart and of the charts inside it."""
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
    """The whole figure as Vega-Lite: title, caption under it, description, theme."""
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
