"""Draws the attention that inserted tokens receive: filler against a random sentence.

Drawn from `positions` and `tokens`; a panel per model, each with its own scale.
"""

from dataclasses import replace
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.charts.profile import Y_TITLE, profile_pairs
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Request
from attnscope.figures.numbers import differences, rounded
from attnscope.figures.profiles import (
    HEAD_COLUMNS,
    OPTIONS,
    ProfileContext,
    measure_of_heads,
    panels_of,
    profile_text,
    rows_of,
)
from attnscope.figures.select import (
    AbsentError,
    conditions_in_order,
)
from attnscope.figures.text_format import count, number
from attnscope.figures.theme import Style

SPAN, WHOLE = "inserted span", "whole sequence"


def _chart(frame: pl.DataFrame, style: Style, *, count_from: int = 0) -> Any:
    """Per model the inserted span above, the whole sequence below.

    Columns: those of `profile_pairs`; `panel` is "inserted span" or "whole sequence", `series` the
    filler's name first, then the sentence's.
    """
    names = frame["series"].unique(maintain_order=True).to_list()
    theme = style.theme
    return profile_pairs(
        frame,
        style,
        colours=dict(zip(names, [theme.filler, theme.sentence, *theme.models], strict=False)),
        panels={SPAN: "token of the inserted span", WHOLE: "token of the whole sequence"},
        span="inserted",
        own_scale=True,
        count_from=count_from,
    )


def _numbers(request: Request) -> FigureNumbers[ProfileContext]:
    filler, sentence = names = _two(request)
    labels = {
        filler: "filler" if filler == "filler" else f"filler ({filler})",
        sentence: "random sentence" + ("" if sentence == "sentence" else f" ({sentence})"),
    }
    selection, rows = rows_of(request, names, per_model=1)
    rows = rows.with_columns(pl.col("condition").replace_strict(labels).alias("series"))
    inserted = rows.filter(pl.col("role") == "filler")
    first = pl.col("position").min().over("model", "prompt", "series", "layer", "head")
    inserted = inserted.with_columns(pl.col("position") - first)
    if request.options["leave_out_first"]:
        rows = rows.filter(pl.col("position") > 0)
    both = {SPAN: inserted, WHOLE: rows}
    numbers = panels_of(request, selection, both, names, list(labels.values()))
    return replace(numbers, differences=_uniformity(numbers, request))


def _two(request: Request) -> list[str]:
    """The conditions for filler and sentence: as chosen, else by what they insert."""
    names = conditions_in_order(request.run, request.run.cells["condition"].unique())
    variants = [c for c in names if c != request.run.experiment.base]
    if request.choice.conditions is not None:
        chosen = [c for c in request.choice.conditions if c in variants]
        if len(chosen) != 2:
            raise InputError(
                "filler-vs-sentence shows two conditions that insert something; choose two of: "
                f"{', '.join(variants) or 'none in this run'}",
                code="number-of-conditions",
                conditions=chosen,
                known=variants,
            )
        return chosen
    inserts = {name: what.insert for name, what in request.run.experiment.conditions.items()}
    insertions = {name: insert.kind for name, insert in inserts.items() if insert is not None}
    sentence = [
        c for c in variants if insertions.get(c) in ("sentence", "lorem") or "sentence" in c
    ]
    filler = [c for c in variants if c not in sentence]
    if not sentence or not filler:
        raise AbsentError(
            f"this run has no pair of filler and sentence (conditions: {', '.join(names)})",
            code="nothing-to-compare",
            conditions=names,
        )
    return [filler[0], sentence[0]]


def _uniformity(numbers: FigureNumbers[ProfileContext], request: Request) -> pl.DataFrame | None:
    """Difference of the coefficient of variation, paired by prompt, if the run has it."""
    filler, sentence = numbers.context.conditions
    values = measure_of_heads(request, numbers.context, "uniformity", numbers.context.conditions)
    if values is None or values[0].drop_nulls("value")["condition"].n_unique() != 2:
        return None
    table = differences(values[0], "condition", [(filler, sentence)], HEAD_COLUMNS, request.units)
    order = numbers.context.heads.with_row_index("rank")
    table = table.join(order, on=HEAD_COLUMNS).sort("rank").drop("rank")
    panel = f"coefficient of variation over the span{values[1]}"
    return table.with_columns(pl.lit(panel).alias("panel"))


def _text(numbers: FigureNumbers[ProfileContext], request: Request) -> FigureText:
    filler, sentence = numbers.context.conditions
    spans = numbers.data.filter(pl.col("panel") == SPAN)
    lengths = spans.group_by(*HEAD_COLUMNS, "series").agg(pl.col("tokens").sum())
    unequal = lengths.group_by(HEAD_COLUMNS).agg(pl.col("tokens").n_unique() > 1)["tokens"].any()
    names = numbers.data["series"].unique(maintain_order=True)
    colours = [request.theme.filler, request.theme.sentence]
    heads = count(numbers.context.heads.height, "head")
    return profile_text(
        numbers,
        request,
        see="Lines are the average attention weight that each inserted token receives, filler "
        "against a "
        "random sentence",
        about=f"conditions: {filler} and {sentence}; a y scale per panel",
        more="The two spans differ in length" if unequal else "",
        title="Filler against a random sentence at the same position",
        overview=f"Line charts for {heads}, a column each: above, the inserted span, {filler} "
        f"against {sentence}; below, the whole sequence, the span shaded.",
        axes=[
            "x, above: index within the inserted span; below: index in the sequence",
            f"y: {Y_TITLE}, with a separate scale in each panel",
        ],
        legend=[f"{name}: {colour}" for name, colour in zip(names, colours, strict=True)],
        notes=_variation(numbers, request.options["count_from"]),
        no_differences="The run has no `uniformity` over prompts to compare the two by.",
    )


def _variation(numbers: FigureNumbers[ProfileContext], start: int) -> list[str]:
    """Mean and coefficient of variation of the shown spans."""
    spans = numbers.context.full.filter(pl.col("panel") == SPAN)
    variation = spans.group_by(*HEAD_COLUMNS, "series", maintain_order=True).agg(
        pl.col("value").mean().alias("mean"),
        (pl.col("value").std(ddof=0) / pl.col("value").mean()).alias("variation"),
        pl.col("value").count().alias("tokens"),
    )
    return [
        f"{row['model']}, layer {row['layer'] + start}, head {row['head'] + start}, "
        f"{row['series']}: mean {number(row['mean'])} over {row['tokens']} inserted tokens, "
        f"coefficient of variation {number(row['variation'])}."
        for row in rounded(variation).iter_rows(named=True)
    ]


FIGURE = Figure(
    name="filler-vs-sentence",
    shows="a panel per model: filler and sentence over the inserted span and the whole sequence",
    needs="an experiment with `profile` among its measures and two conditions that insert "
    "something, filler and a sentence, has them, such as the recipe filler-vs-sentence",
    numbers=_numbers,
    chart=_chart,
    text=_text,
    height=140,
    options=OPTIONS,
    claims=("uniform-filler",),
)
