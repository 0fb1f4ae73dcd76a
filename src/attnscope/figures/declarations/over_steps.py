"""Measures of each layer against the step of training."""

from dataclasses import replace

import polars as pl

from attnscope.figures.figure import Figure, Numbers, Request
from attnscope.figures.options import COMBINE, Option
from attnscope.figures.quantities import quantity
from attnscope.figures.reading import read, summarise
from attnscope.figures.select import AbsentError, thin
from attnscope.figures.shapes.lines import Lines
from attnscope.figures.text_format import join, upper_first

NEEDS = (
    "the run that attnscope.TrainerCallback writes has the numbers, or an experiment with saved "
    "checkpoints as models and the labels `step 0`, `step 100` …"
)


def _numbers(request: Request, figure: Figure) -> Numbers:
    chosen = request.options["measure"]
    measures = figure.measures if chosen is None else [chosen]
    rows = read(request, figure, measures)
    step = pl.col("model").str.extract(r"^step (\d+)$").cast(pl.Int64)
    values = rows.values.with_columns(training_step=step)
    if values["training_step"].has_nulls():
        raise AbsentError(
            f"the models {join(rows.selection.models)} are not steps of one training under one "
            "condition",
            code="no-steps",
            models=rows.selection.models,
        )
    titles = {m: upper_first(quantity(m, rows.normalise, "")["axis"]) for m in rows.measures}
    return summarise(replace(rows, values=values, settings={"y": titles}), figure)


FIGURE = Figure(
    name="over-steps",
    shows="entropy, first-token mass and largest score of each layer while a model trains",
    measures=["entropy", "first_token", "max_logit"],
    layers=lambda layers: thin(layers, 8),
    by=["measure", "training_step", "layer"],
    shape=Lines(panel="measure", series="layer", x="training_step", x_title="Step of training"),
    numbers=_numbers,
    title="{y}, by step of training",
    what="Each line is one layer: {y} of the same prompts while the model trains",
    quantity="value",
    needs=NEEDS,
    options={**COMBINE, "measure": Option(help="name of one measure; default: all three")},
)
