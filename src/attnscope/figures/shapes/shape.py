"""What all shapes have in common: columns and titles, the text they imply, rows of panels.

Charts get plain values; altair computes no number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import altair as alt
import polars as pl

from attnscope.figures.text_format import join, number, wrap
from attnscope.figures.theme import Style, Theme

FORMS = {
    "layer": "layer {}",
    "head": "head {}",
    "from": "from {}",
    "to": "to {}",
    "step": "generated token {}",
    "training_step": "step {}",
    "position": "position {}",
    "place": "from {}",
    "filler_tokens": "{} filler tokens",
    "depth": "depth {}",
    "length": "{} words",
    "token": "token “{}”",
}
"""How a value of a column is written in a sentence; others stand as they are."""
CLASS_LABELS = {"hash": "# (hash)", "star": "* (star)", "slash": "/ (slash)"}
"""Legend labels of classes that are one character."""
LABEL = f"({CLASS_LABELS})[datum.label] || datum.label"
"""The same as an expression of Vega."""

TALLEST = 1_500
"""Height of the panels of a figure in pixels, so that the figure fits into two screens."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How rows become a chart, and the text that follows from it.

    `panel`, `series` and `x` name columns: a panel for each value (all rows are one panel if there
    is no such column), a colour for each, a place across. A shape defines `draw`, and of the rest
    what differs.
    """

    panel: str = "panel"
    series: str = ""
    x: str = ""
    x_title: Any = ""
    """Title of the x axis; `Dots` may have one for each panel."""
    value: str = "value"
    """The column of the value shown."""
    y: Any = "Value"
    """Title of the value: of the y axis, or of the colours. `Lines` may have one for each panel."""
    rule: float | None = None
    """The value that means no change: a dashed horizontal line, or the middle of the colours."""
    rule_means: str = "no change"

    rank: ClassVar[int] = 9
    """Place of its figures in a report."""
    intervals: ClassVar[str | None] = None
    """How intervals are drawn, as a part of the caption; None if they are not."""
    rule_sign: ClassVar[str] = "dashed line"

    def draw(self, frame: pl.DataFrame, style: Style) -> Any:
        """The chart of these rows."""
        raise NotImplementedError

    def for_data(self, frame: pl.DataFrame) -> Shape:
        """The shape for these rows; another one if there are too many."""
        return self

    def arrange(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows with the columns that the chart computes, such as the ends of stacked parts."""
        return frame

    @property
    def drawn(self) -> str:
        """What is drawn: the first words of the overview."""
        raise NotImplementedError

    @property
    def order(self) -> list[str]:
        """The columns that rows are sorted by."""
        return [column for column in (self.panel, self.series, self.x) if column]

    @property
    def split(self) -> list[str]:
        """The columns whose values each have their own largest and smallest value."""
        return [self.panel]

    def ranked(self, frame: pl.DataFrame) -> str | None:
        """The column whose values the description ranks."""
        return None

    def rank_for(self, frame: pl.DataFrame) -> int:
        """Place of the figure in a report, for these rows."""
        return self.rank

    def overview(self, frame: pl.DataFrame) -> str:
        """One sentence: what is drawn."""
        parts = [self.drawn + (" with 95 % intervals" if self.interval(frame) else "")]
        if self.series:
            parts.append(f"one {one_per(frame, self.series)}")
        if self.panel in frame.columns:
            parts.append(f"a panel {one_per(frame, self.panel)}")
        if self.rule is not None:
            parts.append(f"{self.rule_sign} at {self.rule:g}: {self.rule_means}")
        return f"{'; '.join(parts)}."

    def axes(self, frame: pl.DataFrame) -> list[str]:
        """A line for each axis."""
        return [
            axis_text("x", self.x_title, frame, self.x),
            axis_text("y", self.y, frame, self.value),
        ]

    def colours(self, frame: pl.DataFrame, theme: Theme) -> dict[Any, str]:
        """The colour of each series."""
        if not self.series:
            return {}
        names = names_in(frame, self.series)
        of_classes = self.series == "class"
        colours = theme.class_colours(names) if of_classes else theme.series_colours(len(names))
        return dict(zip(names, colours, strict=True))

    def colour(self, frame: pl.DataFrame, theme: Theme, **legend: Any) -> alt.Color:
        """The colours of the series, with a legend above the panels."""
        colours = self.colours(frame, theme)
        scale = alt.Scale(domain=list(colours), range=list(colours.values()))
        shown: dict[str, Any] = {"orient": "top", "title": None, "symbolOpacity": 1} | legend
        kind = "N" if frame.schema[self.series] == pl.String else "O"
        return alt.Color(f"{self.series}:{kind}", scale=scale, legend=alt.Legend(**shown))

    def interval(self, frame: pl.DataFrame) -> str | None:
        """How intervals are drawn; None if they are not, or if there are none."""
        return self.intervals if frame["low"].null_count() < frame.height else None

    def hollow(self, frame: pl.DataFrame) -> bool:
        """Whether points without an interval are drawn hollow."""
        return False

    def margin(self, frame: pl.DataFrame) -> float:
        """Width of axes and labels in pixels: the caption is this much wider than the panels."""
        return 50

    def width(self, frame: pl.DataFrame) -> float:
        """Default width of a row of panels in pixels."""
        return {1: 480, 2: 700}.get(len(self.parts(frame)), 800)

    def parts(self, frame: pl.DataFrame) -> list[pl.DataFrame]:
        """The rows of each panel; all rows if there is no column of panels."""
        if self.panel not in frame.columns:
            return [frame]
        return frame.partition_by(self.panel, maintain_order=True)

    def panels(
        self,
        frame: pl.DataFrame,
        marks: Callable[[pl.DataFrame, bool, float], list[Any]],
        style: Style,
        *,
        gap: float = 24,
        titled: bool = True,
    ) -> Any:
        """A panel for each value of `panel`, at most three in a row.

        `marks` gets the data of a panel, whether it is the first of its row, and its width.
        """
        parts = self.parts(frame)
        columns = columns_for(len(parts), 3)
        wide = style.width / columns - (gap if columns > 1 else 0)
        tall = min(style.height, max(60, TALLEST / -(-len(parts) // columns) - 60))
        charts = []
        for i, part in enumerate(parts):
            drawn = marks(part, i % columns == 0, wide)
            if titled and len(parts) > 1:
                drawn.append(panel_title([part[self.panel][0]], wide, style.theme))
            charts.append(alt.layer(*drawn).properties(width=wide, height=tall))
        spacing: Any = {"row": 26, "column": 26}
        return alt.concat(*charts, columns=columns, spacing=spacing).resolve_scale(color="shared")

    def tooltip(self, frame: pl.DataFrame, *columns: str) -> list[alt.Tooltip]:
        """The tooltip: panel, place, series, value and interval, unchanged, and these columns."""
        common = ["condition", *columns, "value", "low", "high", "n", "q"]
        return tooltips(frame, [self.panel, self.x, self.series, *common])


def axis_text(axis: str, title: Any, frame: pl.DataFrame, column: str) -> str:
    """The title of an axis (or the titles in its panels), and the ends of its numbers."""
    title = title if isinstance(title, str) else " or ".join(dict.fromkeys(title.values()))
    if column not in frame.columns or not frame.schema[column].is_numeric():
        return f"{axis}: {title}"
    return f"{axis}: {title}, from {number(frame[column].min())} to {number(frame[column].max())}"


def names_in(frame: pl.DataFrame, column: str) -> list[Any]:
    """The values of a column, in the order of the rows."""
    return frame[column].unique(maintain_order=True).to_list()


def one_per(frame: pl.DataFrame, column: str) -> str:
    """`for each model (a, b)`; `for each of a and b` for a column without a meaning of its own."""
    names = [FORMS.get(column, "{}").format(name) for name in names_in(frame, column)]
    names = [*names[:12], f"{len(names) - 12} more"] if len(names) > 12 else names
    separator = "; " if any("," in name for name in names) else ", "
    if column in ("panel", "series", "item"):
        return f"for each of {join(names, separator=separator)}"
    return f"for each {column} ({separator.join(names)})"


def chart_of(frame: pl.DataFrame | None = None) -> Any:
    """A chart of plain rows; without a frame of one empty row, for marks with fixed coordinates.

    Frames become rows here, because the row limit of altair for frames is a global setting.
    """
    return alt.Chart(rows_of(frame))


def rows_of(frame: pl.DataFrame | None) -> alt.InlineData:
    """The rows of a frame, all of them."""
    return alt.InlineData(values=[{}] if frame is None else frame.to_dicts())


def rule_at(value: float | None, chart: Any = None) -> list[Any]:
    """A dashed horizontal line, if there is a value; `chart` is used if it already has data."""
    if value is None:
        return []
    rule = (chart or chart_of()).mark_rule(style="faint-rule", strokeDash=[5, 3])
    return [rule.encode(y=alt.YDatum(value))]


def value_range(
    frame: pl.DataFrame, *also: float | None, of: Sequence[str] = ("value", "low", "high")
) -> list[float]:
    """Minimum and maximum of the columns and of the further values."""
    values = [value for value in also if value is not None]
    for column in of:
        values += [v for v in (frame[column].min(), frame[column].max()) if isinstance(v, float)]
    return [min(values), max(values)]


def tooltips(frame: pl.DataFrame, columns: Sequence[str]) -> list[alt.Tooltip]:
    """The tooltip: these columns of the frame, unchanged."""
    types: Mapping[bool, Any] = {True: "quantitative", False: "nominal"}
    return [
        alt.Tooltip(field=c, type=types[frame.schema[c].is_float()], title=c)
        for c in dict.fromkeys(columns)
        if c in frame.columns
    ]


def columns_for(panels: int, most: int = 4) -> int:
    """Number of panels per row, so that rows have nearly equal length."""
    if panels <= most:
        return max(panels, 1)
    rows = -(-panels // most)
    return -(-panels // rows)


def text_mark(lines: Sequence[str], **mark: Any) -> Any:
    """Lines of text; the caller gives the place."""
    return chart_of().mark_text(text=list(lines), **mark)


def panel_title(lines: Sequence[str], width: float, theme: Theme, rise: float = 12) -> Any:
    """The title of a panel, wrapped to its width. It is a mark, so that all titles align."""
    text = [part for line in lines for part in wrap(line, width, (theme.size + 1) * 1.1)]
    leading = theme.size + 4
    mark: dict[str, Any] = {"align": "left", "baseline": "bottom", "clip": False}
    mark |= {"lineHeight": leading, "dy": -rise - leading * (len(text) - 1)}
    return text_mark(text, style="panel-title", **mark).encode(x=alt.value(0), y=alt.value(0))


def figure_spec(
    chart: Any,
    *,
    title: str,
    what: str,
    small_print: str,
    alt_text: str,
    width: float,
    theme: Theme,
) -> dict[str, Any]:
    """The figure as Vega-Lite: title, what is seen, chart, and the small print below it."""
    width = max(width, 400)
    below = wrap(small_print, width, theme.size - 1)
    style: dict[str, Any] = {"orient": "bottom", "anchor": "start", "style": "small-print"}
    chart = chart.properties(title=alt.TitleParams(text=below, **style))
    above = alt.TitleParams(
        text=wrap(title, width, (theme.size + 3) * 1.08), subtitle=wrap(what, width, theme.size)
    )
    figure = alt.vconcat(chart).properties(title=above, description=alt_text)
    return figure.to_dict() | {"config": theme.config()}
