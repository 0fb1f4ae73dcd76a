"""A difference between two models or conditions in each head; significant heads are marked."""

from dataclasses import replace

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.comparing import SHOW, compared_by_head
from attnscope.figures.figure import Figure, Numbers, Request
from attnscope.figures.numbers import LEVEL
from attnscope.figures.options import MEASURE, NORMALISE, SCALE, Option
from attnscope.figures.reading import read
from attnscope.figures.select import Selection
from attnscope.figures.shapes.matrix import Matrix


def _numbers(request: Request, figure: Figure) -> Numbers:
    rows = read(request, figure)
    selection, base = rows.selection, request.run.experiment.base
    over, of, minus = _pair(selection, base, request.options["over"])
    if over == "model":
        first = base if base in selection.conditions else selection.conditions[0]
        held, fixed, models = "condition", first, [of, minus]
    else:
        held, fixed, models = "model", selection.models[0], selection.models[:1]
    kept = selection.frame.filter(pl.col(held) == fixed)
    rows = replace(
        rows,
        selection=replace(selection, frame=kept, model_names=models),
        words={**rows.words, "held": f"{held} {fixed}"},
    )
    return compared_by_head(rows, figure, over, of, minus)


def _pair(selection: Selection, base: str, over: str | None) -> tuple[str, str, str]:
    """What is compared (model or condition), the first side, and the side subtracted from it."""
    variants = [c for c in selection.conditions if c != base]
    if over != "condition" and len(selection.models) > 1:
        return "model", selection.models[1], selection.models[0]
    if over != "model" and base in selection.conditions and variants:
        return "condition", variants[0], base
    if over != "model" and len(variants) > 1:
        return "condition", variants[1], variants[0]
    raise InputError(
        "a difference needs two models or two conditions; this choice has the models "
        f"{', '.join(selection.models)} and the conditions {', '.join(selection.conditions)}; "
        "`head-map` shows the values of one",
        code="nothing-to-compare",
        models=selection.models,
        conditions=selection.conditions,
    )


FIGURE = Figure(
    name="effect-heads",
    shows="layers × heads: the difference of a measure; a dot marks heads with q < 0.05",
    measures=["mass", "entropy"],
    base_only=False,
    by=["item", "layer", "head"],
    shape=Matrix(
        panel="item",
        value="difference",
        rule=0.0,
        marked="significant",
        mark_means=f"q < {LEVEL}",
    ),
    numbers=_numbers,
    title="{title}: {of} against {minus}, head by head",
    what="Each cell is one head: {measure}, {of} minus {minus}, {held}",
    quantity="{show}",
    needs="an experiment that has this measure, with two models or two conditions, has it",
    options={
        **MEASURE,
        "over": Option(
            help="compare model or condition; default: models, if there are two",
            known=(None, "model", "condition"),
        ),
        **SHOW,
        **NORMALISE,
        **SCALE,
    },
)
