"""Draws how a score depends on the settings of a condition, as differences from the baseline.

Drawn from a table of scores.
"""

from typing import Any

import polars as pl

from attnscope.figures.charts.dots import side_by_side
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Drawing, draw_table
from attnscope.figures.numbers import rounded
from attnscope.figures.text_format import join
from attnscope.figures.theme import Style
from attnscope.stats.contrast import TESTED

COLUMNS = ("panel", "setting", "series", "value", "low", "high", "score", "n", "q")


def sweep(table: pl.DataFrame, *, of: str, baseline: float, **options: Any) -> Drawing:
    """The figure `sweep` of a table with `panel` (condition and setting), `setting` (its value, as
    written), `series` (the other settings), `value` (the difference from the baseline) with `low`
    and `high`, the `score` itself, `n` problems and `q`; `of` names the scores."""
    data = rounded(table.select(COLUMNS))
    n = max(data["n"].to_list(), default=0)
    names = data["panel"].unique(maintain_order=True).to_list()
    none = data["low"].null_count()
    text = FigureText(
        title=f"Sensitivity: {of}",
        caption=[
            "Each point is the score under a condition minus the score of the baseline "
            f"({baseline:.3f})",
            f"n = {n} problems, paired by problem; each panel varies one setting, the others have "
            "their defaults or the values in the legend",
            "Bars: 95 % confidence intervals over problems",
            f"{none} differences have no interval: too few problems, or all values are equal"
            if none
            else "",
        ],
        models=[],
        overview=f"Differences of scores with their intervals, a panel for each of {join(names)}.",
        axes=["x: the setting", "y: score minus the baseline's"],
        legend=["dashed line: no difference"],
        quantity="difference",
        places={"panel": "{}", "setting": "{}", "series": "{}"},
        split=["panel"],
        no_differences=f"{int((data['q'] < 0.05).sum())} of {data['q'].count()} tested differences "
        f"have q < 0.05 (p over problems: {TESTED}; Benjamini–Hochberg).",
    )
    return draw_table("sweep", data, text, _chart, width=780, height=220, **options)


def _chart(frame: pl.DataFrame, style: Style) -> Any:
    names = frame["panel"].unique(maintain_order=True).to_list()
    titles = {name: name.rpartition(": ")[2] for name in names}
    return side_by_side(
        frame, style, x="setting", x_titles=titles, y_title="Score minus baseline", rule=0.0
    )
