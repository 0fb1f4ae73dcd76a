"""Mass by place: over the turns of a conversation, or over documents in order.

Drawn from `mass` over the numbered places among the experiment's queries or keys. This module
must not know how it is measured.
"""

import re
from dataclasses import replace
from typing import Any

import polars as pl

from attnscope.figures.caption import settings_text
from attnscope.figures.charts.lines import curves
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Request
from attnscope.figures.numbers import in_order
from attnscope.figures.select import AbsentError, ValueRows, select
from attnscope.figures.series import mean_lines, series_text
from attnscope.figures.theme import Style

LINES = ["measured", "uniform"]
NUMBERED = re.compile(r"(?!sample:)(?:(?:region|after|predicts):)?\w+:(\d+)(?::\w+)?", re.ASCII)
"""A numbered place: `document:3`, `turn:2:user`, `region:turn:2:assistant`."""
Context = tuple[ValueRows, str, list[str]]
"""The rows of the first place; what is in order, queries or keys; the places."""


def _chart(frame: pl.DataFrame, style: Style) -> Any:
    """`value` with `low` and `high` over `place`, a line per `series`, a panel per `panel`."""
    return curves(frame, style, x="place", x_title="Place, from 1", y_title="Mass")


def _places(request: Request) -> tuple[str, list[str]]:
    """Queries or keys that are numbered places of one kind (`document:1`, `document:2` …), in the
    order of their numbers; of two such axes the longer."""
    by_axis: dict[str, list[str]] = {}
    for axis in ("queries", "keys"):
        numbered: dict[str, list[tuple[int, str]]] = {}
        for name in getattr(request.run.experiment, axis):
            if match := NUMBERED.fullmatch(name):
                kind = name[: match.start(1)] + name[match.end(1) :]
                numbered.setdefault(kind, []).append((int(match[1]), name))
        longest: list[tuple[int, str]] = max(numbered.values(), key=len, default=[])
        by_axis[axis] = [name for _, name in sorted(longest)]
    axis = max(by_axis, key=lambda name: len(by_axis[name]))
    if len(by_axis[axis]) < 2:
        raise AbsentError(
            "this run has no two numbered queries or keys such as document:1 and document:2",
            code="nothing-in-order",
        )
    return axis, by_axis[axis]


def _numbers(request: Request) -> FigureNumbers[Context]:
    axis, places = _places(request)
    parts = []
    for number, label in enumerate(places, 1):
        at_place: dict[str, Any] = {axis: label}
        here = select(request.run, replace(request.choice, **at_place), ["mass"], base_only=True)
        summed = here.frame.group_by("model", "prompt", "layer", "head", maintain_order=True).agg(
            pl.col("value", "uniform").sum()
        )
        name, at = pl.lit(label).alias("name"), pl.lit(number).alias("place")
        parts += [
            (here, summed.select("model", "prompt", of, pl.lit(line).alias("series"), name, at))
            for line, of in zip(
                LINES, (pl.col("value"), pl.col("uniform").alias("value")), strict=True
            )
        ]
    selection = parts[0][0]
    rows = pl.concat([part for _, part in parts])
    frame = mean_lines(request, rows, ["model", "series", "place", "name"], "mass")
    frame = in_order(frame.sort("place"), panel=selection.models, series=LINES)
    return FigureNumbers(
        measures=["mass"], data=frame, context=(selection, axis, places), width=480, margin=60
    )


def _text(numbers: FigureNumbers[Context], request: Request) -> FigureText:
    selection, axis, places = numbers.context
    # What is in order is named by its ends: every place has its name in the table.
    ends = f"{places[0]} to {places[-1]}"
    shown = replace(selection, keys=ends) if axis == "keys" else replace(selection, queries=ends)
    return series_text(
        *(numbers, request, selection, LINES, "mean over layers and all heads"),
        f"{len(places)} places, the {axis} in order",
        "Mass of all shown classes, not normalised further, and what uniform attention would "
        f"give; {settings_text(shown)}",
        x=("name", "{}"),
        title=f"Mass by place of the {axis}",
        overview=f"Two lines over {len(places)} places: the mass as measured, and under uniform "
        "attention.",
        axes=["x: place, from 1", "y: mass"],
        quantity="mass",
        no_differences="Values by place, not differences.",
    )


FIGURE = Figure(
    name="order",
    shows="mass over turns or documents in order, beside uniform attention",
    needs="an experiment with `mass` and queries or keys that are numbered turns or documents "
    "(`document:1`, `document:2` …) has them",
    numbers=_numbers,
    chart=_chart,
    text=_text,
)
