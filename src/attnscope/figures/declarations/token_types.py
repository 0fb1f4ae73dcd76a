"""Attention by token class as bars: a group per layer, models side by side."""

from dataclasses import replace

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.figure import Figure
from attnscope.figures.options import COMBINE, NORMALISE, Option
from attnscope.figures.reading import Rows
from attnscope.figures.select import AbsentError, thin
from attnscope.figures.shapes.bars import TOTAL, Bars

ADD_UP = ("mass", "share")
"""Normalisations that may be stacked, because their parts add up."""


def _with_totals(rows: Rows) -> Rows:
    """The rows with the class "total": the sum of the classes of a bar; undefined if one is."""
    options, how = rows.request.options, rows.normalise
    if len(rows.selection.items) < 2 and rows.request.choice.items is None:
        raise AbsentError(
            f"this run has one token class ({rows.selection.items[0]}), which `classes` shows",
            code="one-class-only",
        )
    if how not in ADD_UP:
        if options["uniform"]:
            raise InputError(
                f"the option uniform does not work with normalise={how!r}; use "
                f"{' or '.join(ADD_UP)}, or leave it out",
                code="conflicting-options",
                normalise=how,
            )
        whiskers = "none" if options["whiskers"] == "none" else "classes"
        settings = {**rows.settings, "stacked": False, "whiskers": whiskers}
        return replace(rows, settings=settings)
    numbers = ["value", "uniform", "tokens"]
    values = rows.values.with_columns(pl.col("head").cast(pl.Int16))
    by = [c for c in values.columns if c not in ("item", *numbers)]
    totals = values.group_by(by, maintain_order=True).agg(
        pl.lit(TOTAL).alias("item"),
        *(pl.when(pl.col(n).null_count() == 0).then(pl.col(n).sum()).alias(n) for n in numbers),
    )
    line = "Line across a bar: the total under uniform attention"
    y = "Total attention (sum)" if how == "mass" else rows.settings["y"]
    return replace(
        rows,
        values=pl.concat([values, totals.select(values.columns)]),
        settings={**rows.settings, "y": y},
        sentences=[line if options["uniform"] else ""],
        text={
            "parts": {"a class": pl.col("class") != TOTAL, "a whole bar": pl.col("class") == TOTAL}
        },
    )


FIGURE = Figure(
    name="token-types",
    shows="bars: layers as groups, models side by side",
    measures=["mass"],
    by=["layer", "model", "class"],
    also=["tokens", "uniform"],
    shape=Bars(),
    change=_with_totals,
    title="{title}, by layer",
    what="Each bar is one model in one layer: {definition}",
    quantity="attention",
    needs="an experiment with `mass` among its measures has it, such as the recipe token-types",
    height=280,
    layers=lambda layers: thin(layers, 8),
    options={
        "whiskers": Option(
            help="total (default), classes or none",
            known=("none", TOTAL, "classes"),
            default=TOTAL,
        ),
        "uniform": Option(help="the total under uniform attention", known=(False, True)),
        **COMBINE,
        **NORMALISE,
    },
)
