"""A needle's depth by the length of its text: how well it is found, place by place.

Drawn from any measure that has heads, and from what is known of the prompts: `depth` and `length`.
This module must not know how either came about.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from attnscope.figures.caption import layers_said, left_out, measured, prompts_said
from attnscope.figures.charts.matrix import matrices
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Option, Request
from attnscope.figures.head_panels import MEASURE, of_heads
from attnscope.figures.numbers import in_order, means, shown
from attnscope.figures.select import AbsentError, ValueRows
from attnscope.figures.text_format import join
from attnscope.figures.theme import Style
from attnscope.stats.tables import possible

COMBINE = Option(said="`combine` max, mean", known=("max", "mean"))
SensitivityText = tuple[ValueRows, str]
"""The rows, and the measure."""


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


def _numbers(asked: Request) -> FigureNumbers[SensitivityText]:
    known = asked.run.prompts
    if known is None or not {"depth", "length"} <= set(known.columns):
        raise AbsentError(
            "the prompts of this run have no metadata columns depth and length",
            missing=["depth", "length"],
        )
    found, measure = of_heads(asked, base_only=True)
    of = pl.col("value").max() if asked.options["combine"] == "max" else pl.col("value").mean()
    rows = found.frame.filter(pl.col("value").is_not_null())
    whole = rows.group_by("model", "prompt", maintain_order=True).agg(of)
    whole = whole.join(known.select("prompt", "depth", "length"), on="prompt")
    frame = shown(
        means(whole, ["model", "depth", "length"], asked.sources, possible(measure))
    ).rename({"model": "panel"})
    frame = in_order(frame.sort("length", "depth"), panel=found.models)
    return FigureNumbers(
        measures=[measure],
        data=frame,
        told=(found, measure),
        settings={"value_title": measure.replace("_", " ")},
        width=420,
        margin=60,
    )


def _words(made: FigureNumbers[SensitivityText], asked: Request) -> FigureText:
    found, measure = made.told
    how = {"max": "the largest of", "mean": "mean over"}[asked.options["combine"]]
    name, colours = measure.replace("_", " "), asked.theme.sequential
    return FigureText(
        title=f"{name.capitalize()} by depth and length",
        caption=[
            f"{join(found.sources)}, {layers_said(found.layers)}, {how} all heads of all layers",
            f"{name}, not normalised further; {measured(found)}",
            prompts_said(asked, made.data, interval=False),
            *left_out(found),
        ],
        models=found.sources,
        overview="Coloured matrices of lengths by depths, with numbers where they fit, a panel per "
        "model.",
        axes=["x: depth, 0 is the beginning of the text", "y: length of the text in words"],
        legend=[f"colour: from {colours[0]} (none) to {colours[-1]} (most)"],
        quantity=name,
        places={"panel": "{}", "depth": "depth {}", "length": "{} words"},
        split=["panel"],
        no_differences="Values, not differences.",
    )


FIGURE = Figure(
    name="needle-map",
    shows="a value by the depth of a needle and the length of its text",
    needs="an experiment on prompts of the source `needle` has them",
    numbers=_numbers,
    chart=_chart,
    words=_words,
    options={"measure": MEASURE, "combine": COMBINE},
)
