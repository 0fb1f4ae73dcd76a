"""Draws mass over the turns of a conversation, or over documents, in their order.

Drawn from `mass` of the numbered queries or keys of an experiment.
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
"""A numbered region: `document:3`, `turn:2:user`, `region:turn:2:assistant`."""
Context = tuple[ValueRows, str, list[str]]
"""The rows of the first region; queries or keys; the regions."""


def _chart(frame: pl.DataFrame, style: Style, *, x_title: str = "Number") -> Any:
    """`value` with `low` and `high` over `place`, a line per `series`, a panel per `panel`."""
    return curves(frame, style, x="place", x_title=x_title, y_title="Attention (mass)")


def _kind(region: str) -> str:
    """`document` for `document:3`, `assistant turn` for `region:turn:2:assistant`."""
    words = re.sub(r"^(?:region|after|predicts):", "", region).split(":")
    return " ".join([*words[2:], words[0]])


def _places(request: Request) -> tuple[str, list[str]]:
    """Numbered queries or keys of one kind (`document:1`, `document:2` …) in numeric order.

    If queries and keys are numbered, the longer list.
    """
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
        measures=["mass"],
        data=frame,
        context=(selection, axis, places),
        settings={"x_title": f"{_kind(places[0]).capitalize()} (1 to {len(places)})"},
        width=480,
        margin=60,
    )


def _text(numbers: FigureNumbers[Context], request: Request) -> FigureText:
    selection, axis, places = numbers.context
    # The caption names the first and the last region; the table names all.
    ends = f"{places[0]} to {places[-1]}"
    kind, direction = _kind(places[0]), "to" if axis == "keys" else "from"
    shown = replace(selection, keys=ends) if axis == "keys" else replace(selection, queries=ends)
    return series_text(
        *(numbers, request, selection, LINES, "mean over layers and all heads"),
        f"Lines are the attention {direction} {kind} 1 to {kind} {len(places)}, as measured and if "
        "attention were uniform",
        f"Mass of all token classes together, raw values; {settings_text(shown)}",
        x=("name", "{}"),
        title=f"Attention {direction} each {kind}, in order",
        overview=f"Two lines over {len(places)} regions ({kind}): the mass as measured, and under "
        "uniform attention.",
        axes=[f"x: {kind}, from 1", "y: mass"],
        quantity="mass",
        no_differences="The figure shows values; differences are not tested.",
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
