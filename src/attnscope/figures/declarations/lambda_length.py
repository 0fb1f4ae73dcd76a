"""λ against the length of the filler."""

from dataclasses import replace

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.figure import Figure
from attnscope.figures.options import COMBINE
from attnscope.figures.reading import LAMBDA, LAMBDA_NEEDS, Rows, label
from attnscope.figures.select import thin
from attnscope.figures.shapes.lines import Lines
from attnscope.figures.text_format import join
from attnscope.spec.experiment import Experiment


def _by_filler(rows: Rows) -> Rows:
    """The rows with their filler and its length; a line has one filler text at one place."""
    run, of_cell = rows.request.run, ["model", "condition"]
    lengths = run.cells.group_by(of_cell).agg(pl.col("filler_tokens").mean())
    filler = pl.col("condition").replace_strict(_fillers(run.experiment), default="filler")
    values = rows.values.join(lengths, on=of_cell, maintain_order="left")
    values = values.with_columns(filler=filler)
    values = values.filter(pl.col("filler_tokens").n_unique().over("model", "filler") > 1)
    conditions = rows.selection.conditions
    if values.is_empty():
        raise InputError(
            "this run has filler of one length only; an experiment with the same filler in several "
            "lengths (conditions with different `count`) has them",
            code="one-length-only",
            conditions=conditions,
        )
    lone = [name for name in conditions if name not in set(values["condition"])]
    others = f"; not shown, because there is only one length: {join(lone)}" if lone else ""
    drawn = "; ".join(values["filler"].unique().sort())
    text = f"Filler: {drawn}{others}; filler tokens: mean over prompts"
    return replace(rows, values=values, sentences=[text])


def _fillers(experiment: Experiment) -> dict[str, str]:
    """By condition, what it inserts and where, without the length: `repeat '/', between`."""
    inserting = {n: c for n, c in experiment.conditions.items() if c.insert is not None}
    several = len({what.by for what in inserting.values()}) > 1
    fillers = {}
    for name, what in inserting.items():
        assert what.insert is not None
        unit = f" {what.insert.unit!r}" if what.insert.unit is not None else ""
        by = [f"by {what.by}"] if several else []
        fillers[name] = ", ".join([f"{what.insert.kind}{unit}", str(what.position), *by])
    return fillers


FIGURE = Figure(
    name="lambda-length",
    shows="λ against the filler's length",
    measures=["lambda"],
    base_only=False,
    layers=lambda layers: thin(layers, 8),
    derived={"panel": label("model", "filler?")},
    by=["panel", "condition", "filler_tokens", "layer"],
    shape=Lines(
        x="filler_tokens",
        series="layer",
        x_title="Filler tokens",
        y="λ (1: unchanged)",
        rule=1.0,
        zero=False,
    ),
    sentences=[LAMBDA],
    change=_by_filler,
    differences="λ already compares two conditions: 1 means no difference.",
    title="λ against the length of the filler",
    what="Each line is λ of one layer over the number of filler tokens; 1 means no change",
    quantity="λ",
    needs=LAMBDA_NEEDS,
    options=COMBINE,
)
