"""The relative change of the variance of activations over layers."""

from dataclasses import replace

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.figure import Figure
from attnscope.figures.reading import ACTIVATIONS, Rows
from attnscope.figures.shapes.lines import Lines
from attnscope.measures.measure import ANY


def _relative_to_base(rows: Rows) -> Rows:
    """The variance under each condition divided by that of the base, minus 1, per prompt."""
    base, conditions = rows.request.run.experiment.base, rows.selection.conditions
    if base not in conditions or len(conditions) < 2:
        raise InputError(
            "a change of variance needs the base and another condition; the conditions here: "
            f"{', '.join(conditions)}",
            code="nothing-to-compare",
            conditions=conditions,
        )
    places, values = ["model", "prompt", "layer"], rows.values
    before = values.filter(condition=base).select(*places, old="value")
    values = values.filter(pl.col("condition") != base)
    values = values.join(before, on=places, how="left", maintain_order="left")
    values = values.with_columns(value=pl.col("value") / pl.col("old") - 1)
    return replace(rows, values=values, within=ANY, words={"base": base})


FIGURE = Figure(
    name="variance",
    shows="relative change of the variance of activations over layers",
    measures=["activation_variance"],
    base_only=False,
    derived={"series": "condition"},
    by=["model", "series", "layer"],
    shape=Lines(panel="model", y="Variance, relative change", rule=0.0),
    heads=ACTIVATIONS,
    sentences=["Variance under a condition divided by that of the base, minus 1, per prompt"],
    change=_relative_to_base,
    differences="base",
    title="Change of the variance of activations, by layer",
    what="Lines are the change of the variance of activations relative to {base}; 0 means no "
    "change",
    quantity="relative change",
    notes=lambda data: ["Differences compare the variances themselves, paired by prompt."],
    needs="an experiment with `activations` among its measures and a condition has the numbers",
)
