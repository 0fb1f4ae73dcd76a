"""Draws a value by the depth of a needle and the length of its text.

Drawn from any measure that has heads, and from the prompt metadata `depth` and `length`.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from attnscope.figures.caption import layers_text, omissions, prompts_text, settings_text
from attnscope.figures.charts.matrix import matrices
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Option, Request
from attnscope.figures.head_panels import MEASURE, select_heads
from attnscope.figures.numbers import in_order, means, rounded
from attnscope.figures.select import AbsentError, ValueRows
from attnscope.figures.text_format import join
from attnscope.figures.theme import Style
from attnscope.stats.tables import possible

COMBINE = Option(help="`combine`: max (default) or mean over heads", known=("max", "mean"))
Context = tuple[ValueRows, str]
"""The rows and the measure."""


def _chart(frame: pl.DataFrame, style: Style, *, value_title: str = "Value") -> Any:
    """A matrix of `length` by `depth` per `panel`, coloured by `value`."""
    top = max(frame["value"].drop_nulls().to_list(), default=1.0) or 1.0
    colours = style.theme.sequential
    return matrices(
        frame,
        style,
        x="depth",
        y="length",
        panel="panel",
        x_order=frame["depth"].unique().sort().to_list(),
        y_order=frame["length"].unique().sort().to_list(),
        x_title="Depth",
        y_title="Length in words",
        value_title=value_title,
        domain=[top * i / (len(colours) - 1) for i in range(len(colours))],
        colours=colours,
        texts=True,
        most=2,
    )


def _numbers(request: Request) -> FigureNumbers[Context]:
    known = request.run.prompts
    if known is None or not {"depth", "length"} <= set(known.columns):
        raise AbsentError(
            "the prompts of this run have no metadata columns depth and length",
            missing=["depth", "length"],
        )
    selection, measure = select_heads(request, base_only=True)
    of = pl.col("value").max() if request.options["combine"] == "max" else pl.col("value").mean()
    rows = selection.frame.filter(pl.col("value").is_not_null())
    by_prompt = rows.group_by("model", "prompt", maintain_order=True).agg(of)
    by_prompt = by_prompt.join(known.select("prompt", "depth", "length"), on="prompt")
    frame = rounded(
        means(by_prompt, ["model", "depth", "length"], request.units, possible(measure))
    ).rename({"model": "panel"})
    frame = in_order(frame.sort("length", "depth"), panel=selection.models)
    return FigureNumbers(
        measures=[measure],
        data=frame,
        context=(selection, measure),
        settings={"value_title": measure.replace("_", " ")},
        width=420,
        margin=60,
    )


def _text(numbers: FigureNumbers[Context], request: Request) -> FigureText:
    selection, measure = numbers.context
    how = {"max": "the largest of", "mean": "mean over"}[request.options["combine"]]
    name, colours = measure.replace("_", " "), request.theme.sequential
    return FigureText(
        title=f"{name.capitalize()} by depth of the needle and length of the text",
        caption=[
            f"Each cell is {name} for a needle at this depth in a text of this length: {how} all "
            "heads of all layers, mean over prompts",
            "Empty cells: the run has no prompt of this depth and length",
            f"{join(selection.model_names)}, {layers_text(selection.layers)}; raw values; "
            f"{settings_text(selection)}",
            prompts_text(request, numbers.data, interval=False),
            *omissions(selection),
        ],
        models=selection.model_names,
        overview="Coloured matrices of lengths by depths, with numbers where they fit, a panel per "
        "model.",
        axes=["x: depth, 0 is the beginning of the text", "y: length of the text in words"],
        legend=[f"colour: from {colours[0]} (none) to {colours[-1]} (most)"],
        quantity=name,
        places={"panel": "{}", "depth": "depth {}", "length": "{} words"},
        split=["panel"],
        no_differences="The figure shows values; differences are not tested.",
    )


FIGURE = Figure(
    name="needle-map",
    shows="a value by the depth of a needle and the length of its text",
    needs="an experiment on prompts of the source `needle` has them",
    numbers=_numbers,
    chart=_chart,
    text=_text,
    options={"measure": MEASURE, "combine": COMBINE},
)
