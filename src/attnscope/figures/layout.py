"""The parts that charts share: rows as data, titles with captions, grids of panels, legends.

Charts get their rows as plain values: altair changes no number. This module must not know runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.theme import Theme
from attnscope.figures.words import wrap

__all__ = ["CLASS_LABELS", "columns_for", "finish", "label_of", "nothing", "panel_title", "tips"]

CLASS_LABELS = {"hash": "# (hash)", "star": "* (star)", "slash": "/ (slash)"}
"""How classes that are one character are called in legends."""


def label_of(name: str) -> str:
    """A class as a legend calls it."""
    return CLASS_LABELS.get(name, name)


def nothing() -> alt.InlineData:
    """One row without a value, for marks that stand at given places."""
    return alt.InlineData(values=[{}])


def tips(frame: pl.DataFrame, columns: Sequence[str]) -> list[alt.Tooltip]:
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
        alt.Chart(nothing())
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


def finish(
    chart: Any, *, title: str, caption: str, alt_text: str, width: float, theme: Theme
) -> dict[str, Any]:
    """The whole figure as Vega-Lite: title, caption under it, description, theme."""
    width = max(width, 400)
    whole = chart.properties(
        title=alt.TitleParams(
            text=wrap(title, width, (theme.size + 3) * 1.08),
            subtitle=wrap(caption, width, theme.size - 1) if caption else [],
        ),
        description=alt_text,
    )
    # Profiles may have more rows than altair's limit for notebooks; what is too many was binned.
    with alt.data_transformers.enable("default", max_rows=None):
        spec: dict[str, Any] = whole.to_dict()
    spec["config"] = theme.config()
    return spec
