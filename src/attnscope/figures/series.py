"""Numbers and text of figures of lines over positions, generated tokens or regions in order."""

from dataclasses import replace
from typing import Any

import polars as pl

from attnscope.figures.binning import PRINT
from attnscope.figures.caption import line_caption
from attnscope.figures.charts.common import series_legend
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import FigureNumbers, Request
from attnscope.figures.numbers import in_order, means, rounded
from attnscope.figures.select import ValueRows, select
from attnscope.stats.tables import possible

SeriesContext = tuple[ValueRows, list[str], int]
"""The rows of the first keys, the names of the lines, and the positions per point."""


def series_numbers(
    request: Request, table: pl.LazyFrame, measure: str, x: str, **settings: Any
) -> FigureNumbers[SeriesContext]:
    """Means over layers, heads and prompts of a measure along the column `x` of a table.

    There is a line for each of the keys, or for the chosen ones, and for each item.
    """
    keys = table.select(pl.col("keys").unique(maintain_order=True)).collect()["keys"].to_list()
    chosen = [request.choice.keys] if request.choice.keys is not None else keys or [None]
    parts, selection = [], None
    for name in chosen:
        choice = replace(request.choice, keys=name)
        of_keys = select(request.run, choice, [measure], base_only=True, table=table)
        selection = selection or of_keys
        named = [pl.col("keys")] if len(chosen) > 1 else []
        if of_keys.frame["item"].n_unique() > 1 or not named:
            named.append(pl.col("item").fill_null(measure))
        series = pl.concat_str(named, separator=", ").alias("series")
        parts.append(of_keys.frame.with_columns(series, pl.col("value").cast(pl.Float64)))
    assert selection is not None
    rows = pl.concat(parts)
    lines = rows["series"].unique(maintain_order=True).to_list()
    first, width = _bins(rows[x], request.run.experiment.bin)
    if width > 1:
        rows = rows.with_columns((pl.col(x) - first) // width * width + first)
    frame = mean_lines(request, rows, ["model", "series", x], measure)
    data = in_order(frame.sort(x), panel=selection.models, series=lines)
    return FigureNumbers(
        measures=[measure],
        data=data,
        context=(selection, lines, width),
        settings=settings,
        width=560,
        margin=60,
    )


def _bins(places: pl.Series, step: int) -> tuple[int, int]:
    """The first position and the width of a bin, so that a line has at most `PRINT` points.

    The bins of the run are `step` positions wide and are not divided.
    """
    first, last = places.min(), places.max()
    assert isinstance(first, int)
    assert isinstance(last, int)
    if places.n_unique() <= PRINT:
        return first, 1
    steps = -(-(last - first + 1) // step)
    return first, step * -(-steps // PRINT)


def mean_lines(request: Request, rows: pl.DataFrame, by: list[str], measure: str) -> pl.DataFrame:
    """Means within each prompt, then over prompts; a panel for each model."""
    by_prompt = rows.group_by(*by, "prompt", maintain_order=True).agg(pl.col("value").mean())
    return rounded(means(by_prompt, by, request.units, possible(measure))).rename(
        {"model": "panel"}
    )


def series_text(
    numbers: FigureNumbers[Any],
    request: Request,
    selection: ValueRows,
    lines: list[str],
    *what: str,
    x: tuple[str, str],
    late: str = "",
    why: str = "",
    **fields: Any,
) -> FigureText:
    """The text of a figure of lines; `x` is the column of positions and the form of one."""
    return FigureText(
        caption=line_caption(request, numbers.data, selection, *what, late=late, why=why),
        models=selection.model_names,
        legend=series_legend(lines, request.theme),
        places={"panel": "{}", "series": "{}", x[0]: x[1]},
        split=["panel"],
        **fields,
    )
