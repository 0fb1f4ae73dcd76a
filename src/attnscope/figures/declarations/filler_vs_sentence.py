"""The attention that inserted tokens receive: filler against a random sentence."""

from dataclasses import replace

import polars as pl

from attnscope.figures.figure import Figure, Numbers, Request
from attnscope.figures.numbers import differences
from attnscope.figures.profiles import (
    KEYS,
    OPTIONS,
    chosen_conditions,
    measure_of_heads,
    profile_numbers,
    select_profiles,
)
from attnscope.figures.shapes.profile import HEAD_COLUMNS, Profile
from attnscope.spec.experiment import Experiment

SPAN, WHOLE = "inserted span", "whole sequence"


def _numbers(request: Request, figure: Figure) -> Numbers:
    names = chosen_conditions(request, _inserting(request.run.experiment), 2)
    filler, sentence = names
    labels = {
        filler: "filler" if filler == "filler" else f"filler ({filler})",
        sentence: "random sentence" + ("" if sentence == "sentence" else f" ({sentence})"),
    }
    selection, heads = select_profiles(request, names)
    of_model = heads.group_by("model", maintain_order=True)
    shown = of_model.head(1).select(HEAD_COLUMNS) if request.choice.heads is None else heads
    rows = selection.frame.with_columns(
        series=pl.col("condition").replace_strict(labels), prompt_position="position"
    ).sort(pl.col("condition") != filler, maintain_order=True)
    first = pl.col("position").min().over("model", "prompt", "series", "layer", "head")
    inserted = rows.filter(role="filler").with_columns(pl.col("position") - first)
    about = f"conditions: {filler} and {sentence}; a y scale per panel"
    panels = {SPAN: inserted, WHOLE: rows}
    numbers = profile_numbers(request, (shown, heads.height), selection, panels, about)
    spans = numbers.data.filter(panel=SPAN).group_by(*HEAD_COLUMNS, "series").len()
    unequal = spans.group_by(HEAD_COLUMNS).agg(pl.col("len").n_unique() > 1)["len"].any()
    more = "The two spans differ in length" if unequal else ""
    values, keys = measure_of_heads(request, shown, selection, "uniformity")
    compared = None
    if values["condition"].n_unique() == 2:
        pair = [(filler, sentence)]
        compared = differences(values, "condition", pair, HEAD_COLUMNS, request.units)
        panel = f"coefficient of variation over the span{keys}"
        compared = shown.join(compared, on=HEAD_COLUMNS, maintain_order="left")
        compared = compared.with_columns(panel=pl.lit(panel))
    return replace(numbers, differences=compared, sentences=[*numbers.sentences, more])


def _inserting(experiment: Experiment) -> list[str]:
    """The first condition that inserts filler, and the first that inserts a sentence."""
    inserts = {n: c.insert.kind for n, c in experiment.conditions.items() if c.insert is not None}
    sentences = [n for n, kind in inserts.items() if kind in ("sentence", "lorem")]
    return [*[n for n in inserts if n not in sentences][:1], *sentences[:1]]


FIGURE = Figure(
    name="filler-vs-sentence",
    shows="a panel per model: filler and sentence over the inserted span and the whole sequence",
    by=KEYS,
    shape=Profile(
        panel_titles={SPAN: "token of the inserted span", WHOLE: "token of the whole sequence"},
        theme_colours=(),
        span="inserted",
        own_scale=True,
    ),
    numbers=_numbers,
    differences="The run has no `uniformity` over prompts to compare the two by.",
    title="Filler against a random sentence at the same position",
    what="Lines are the average attention weight that each inserted token receives, filler against "
    "a random sentence",
    quantity="average attention weight",
    needs="an experiment with `profile` among its measures and two conditions that insert "
    "something, filler and a sentence, has them, such as the recipe filler-vs-sentence",
    height=140,
    options=OPTIONS,
)
