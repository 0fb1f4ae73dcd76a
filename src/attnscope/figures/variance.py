"""Draws the relative change of the variance of activations over layers.

Drawn from `activation_variance`.
"""

from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.caption import keys_text, line_caption
from attnscope.figures.charts.common import series_legend
from attnscope.figures.charts.lines import layer_lines
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Request
from attnscope.figures.near_zero import AFTER
from attnscope.figures.numbers import differences, in_order, means, rounded
from attnscope.figures.select import ValueRows, select
from attnscope.figures.text_format import join
from attnscope.figures.theme import Style


def _chart(frame: pl.DataFrame, style: Style) -> Any:
    """`value` with `low` and `high` over `layer`, a line per `series`, a panel per `model`."""
    names = frame["series"].unique(maintain_order=True).to_list()
    return layer_lines(
        frame,
        style,
        dict(zip(names, style.theme.series_colours(len(names)), strict=True)),
        series="series",
        panel="model",
        y_titles=dict.fromkeys(frame["model"].unique(), "Variance, relative change"),
        rule=0.0,
    )


def _numbers(request: Request) -> FigureNumbers[ValueRows]:
    selection = select(request.run, request.choice, ["activation_variance"])
    base = request.run.experiment.base
    variants = [c for c in selection.conditions if c != base]
    if base not in selection.conditions or not variants:
        raise InputError(
            "a change of variance needs the base and another condition; the conditions here: "
            f"{', '.join(selection.conditions)}",
            code="nothing-to-compare",
            conditions=selection.conditions,
        )
    places = ["model", "prompt", "layer"]
    before = selection.frame.filter(pl.col("condition") == base).select(*places, old="value")
    values = (
        selection.frame.filter(pl.col("condition") != base)
        .join(before, on=places, how="left", maintain_order="left")
        .with_columns(value=pl.col("value") / pl.col("old") - 1, series=pl.col("condition"))
    )
    frame = rounded(means(values, ["model", "series", "layer"], request.units))
    of_layers = ["model", "layer"]
    return FigureNumbers(
        measures=["activation_variance"],
        data=in_order(frame, model=selection.models, series=variants, layer=selection.layers),
        differences=differences(
            selection.frame, "condition", [(c, base) for c in variants], of_layers, request.units
        ),
        width=560 if len(selection.models) == 1 else 780,
        context=selection,
    )


def _text(numbers: FigureNumbers[ValueRows], request: Request) -> FigureText:
    selection, base = numbers.context, request.run.experiment.base
    names = numbers.data["series"].unique(maintain_order=True).to_list()
    return FigureText(
        title="Change of the variance of activations, by layer",
        caption=line_caption(
            *(request, numbers.data, selection, AFTER),
            f"Lines are the change of the variance of activations relative to {base}; 0 means no "
            "change",
            f"Variance under {join(names)} divided by that of {base}, minus 1, per prompt; "
            f"{keys_text(selection.keys)}",
        ),
        models=selection.model_names,
        overview=f"Lines over {len(selection.layers)} layers, one for each of {join(names)}; the "
        "dashed line means no change.",
        axes=["x: layer, from 0", "y: relative change of the variance"],
        legend=series_legend(names, request.theme),
        quantity="relative change",
        places={"model": "{}", "series": "{}", "layer": "layer {}"},
        split=["model"] if len(selection.models) > 1 else [],
        notes=["Differences compare the variances themselves, paired by prompt."],
    )


FIGURE = Figure(
    name="variance",
    shows="relative change of the variance of activations over layers",
    needs="an experiment with `activations` among its measures and a condition has it",
    numbers=_numbers,
    chart=_chart,
    text=_text,
)
