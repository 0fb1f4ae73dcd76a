"""Draws heads in the order of their values.

Drawn from any measure that has heads.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from attnscope.figures.charts.dots import FEW, MANY, head_strip
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Request
from attnscope.figures.head_panels import MEASURE, HeadContext, head_means, heads_caption
from attnscope.figures.numbers import intervals
from attnscope.figures.text_format import join, number

TOP = 10
"""Number of heads that the description names."""


def _numbers(request: Request) -> FigureNumbers[HeadContext]:
    numbers = head_means(request)
    name = pl.format("L{} H{}", "layer", "head").alias("name")
    rank = pl.int_range(pl.len()).over("panel").alias("rank")
    parts = [
        part.sort("value", descending=True, nulls_last=True, maintain_order=True)
        for part in numbers.data.partition_by("panel", maintain_order=True)
    ]
    frame = pl.concat(parts).with_columns(rank, name)
    columns = ["panel", "rank", "name", "layer", "head", "value", "low", "high", "n", "unreliable"]
    width = {1: 560, 2: 720}.get(len(numbers.context.panels), 840)
    return replace(
        numbers,
        data=frame.select(columns),
        settings={"y_title": numbers.context.measure},
        width=width,
    )


def _text(numbers: FigureNumbers[HeadContext], request: Request) -> FigureText:
    drawn = intervals(numbers.data) and max(numbers.data["rank"]) < FEW
    many = max(numbers.data["rank"]) >= MANY
    layers = "Lower panel: the layer of each head" if many else "Colour: layer"
    return FigureText(
        title=f"Heads ranked by {numbers.context.measure}",
        caption=[
            *heads_caption(numbers, request, see="Each dot is one head", interval=drawn),
            f"{layers}; corner: names of the first heads (L: layer, H: head)",
        ],
        models=numbers.context.selection.model_names,
        overview="Every head as a dot, from the largest value to the smallest, a panel for each of "
        f"{join(numbers.context.panels)}.",
        axes=[
            "x: heads, by rank from 0",
            f"y: {numbers.context.measure}",
            *(["y, below: layer, from 0 at the top"] if many else []),
        ],
        legend=[] if many else ["colour: layer, from the first to the last"],
        quantity=numbers.context.measure,
        places={"panel": "{}", "layer": "layer {}", "head": "head {}"},
        split=["panel"],
        notes=[_first(part) for part in numbers.data.partition_by("panel", maintain_order=True)],
        no_differences="The figure shows values; `effect-heads` shows differences.",
    )


def _first(part: pl.DataFrame) -> str:
    named = [f"{row['name']} {number(row['value'])}" for row in part.head(TOP).to_dicts()]
    return f"{part['panel'][0]}: {', '.join(named)}."


FIGURE = Figure(
    name="head-strip",
    shows="heads sorted by the value of a measure, coloured by layer",
    needs="an experiment that has this measure has it",
    numbers=_numbers,
    chart=head_strip,
    text=_text,
    height=220,
    options={"measure": MEASURE},
)
