"""Draws a difference in each head, layers by heads; significant heads are marked.

Drawn from any measure that has heads.
"""

from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.caption import keys_text, layers_text, omissions, prompts_text
from attnscope.figures.charts.matrix import head_matrices
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Option, Request
from attnscope.figures.head_panels import MEASURE, select_heads
from attnscope.figures.numbers import LEVEL, Over, in_order, rounded
from attnscope.figures.select import (
    ValueRows,
    without_tokens,
)
from attnscope.figures.text_format import count, join, number
from attnscope.figures.theme import Style
from attnscope.figures.token_types import PREFERRED
from attnscope.stats.contrast import TESTED
from attnscope.stats.intervals import MINIMUM
from attnscope.stats.paired import compare

SHOW = {"difference": "Difference", "effect": "Standardised effect"}


@dataclass(frozen=True)
class Comparison:
    """The two sides of the comparison and the test."""

    selection: ValueRows
    measure: str
    over: Over
    of: str
    minus: str
    fixed: str
    """The condition (or the model) of both sides."""
    tested: str
    """The sentence on the tests."""


def _chart(
    frame: pl.DataFrame, style: Style, *, show: str = "difference", value_title: str = "Difference"
) -> Any:
    """A matrix of `layer` by `head` per `item`, dots where `significant`.

    Columns: these, and `difference` or `effect`, as `show` selects.
    """
    most = max((abs(v) for v in frame[show].drop_nulls()), default=0.0) or 1.0
    return head_matrices(
        frame,
        style,
        panel="item",
        value=show,
        value_title=value_title,
        domain=[-most, -most / 2, 0, most / 2, most],
        colours=style.theme.diverging,
        marked="significant",
    )


def _numbers(request: Request) -> FigureNumbers[Comparison]:
    show = request.options["show"]
    selection, measure = select_heads(request)
    base = request.run.experiment.base
    over, of, minus = _pair(selection, base, request.options["over"])
    held = "condition" if over == "model" else "model"
    first = base if base in selection.conditions else selection.conditions[0]
    fixed = first if over == "model" else selection.models[0]
    values = selection.frame.filter(pl.col("head").is_not_null(), pl.col(held) == fixed)
    items = selection.items
    if request.choice.items is None and measure == "mass":
        # Only the two sides count: other conditions may have tokens of a class.
        absent = without_tokens(values.filter(pl.col(over).is_in([of, minus])), items)
        items = [c for c in items if c not in absent]
        selection = replace(selection, absent=selection.absent + absent)
    if request.choice.items is None and set(PREFERRED) <= set(items):
        items = list(PREFERRED)
    if items:
        values = values.filter(pl.col("item").is_in(items))
    selection = replace(selection, frame=values.filter(pl.col(over).is_in([of, minus])))
    defined = values.filter(pl.col("value").is_not_null())
    frame = compare(defined, over=over, pair=(minus, of), **request.units.settings)
    frame = frame.with_columns(
        pl.coalesce("item", pl.lit(measure)).alias("item"),
        (pl.col("q") < LEVEL).fill_null(False).alias("significant"),
    )
    if frame["target"].null_count() < frame.height:
        frame = frame.with_columns(pl.format("{} → {}", "item", "target").alias("item"))
        items = frame["item"].unique(maintain_order=True).to_list()
    columns = ["item", "layer", "head", "difference", "effect", "low", "high", "n", "p", "q"]
    frame = in_order(frame.sort("layer", "head"), item=items or [measure])
    frame = rounded(frame.select(*columns, "unreliable", "significant"))
    tests = frame["q"].count()
    tested = (
        f"Dots: {frame['significant'].sum()} of {count(tests, 'test')} with q < {LEVEL} (p: "
        f"{TESTED}; Benjamini–Hochberg over layers × heads of a panel)"
        if tests
        else f"No tests: a p-value needs at least {MINIMUM} {request.unit_name}"
    )
    return FigureNumbers(
        measures=[measure],
        data=frame,
        settings={"show": show, "value_title": f"{SHOW[show]} of {measure} ({of} minus {minus})"},
        width={1: 480, 2: 640}.get(frame["item"].n_unique(), 800),
        margin=40,
        context=Comparison(selection, measure, over, of, minus, fixed, tested),
    )


def _pair(selection: ValueRows, base: str, over: str | None) -> tuple[Over, str, str]:
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


def _text(numbers: FigureNumbers[Comparison], request: Request) -> FigureText:
    context, colours, show = numbers.context, request.theme.diverging, request.options["show"]
    selection = context.selection
    held = "condition" if context.over == "model" else "model"
    classes = f"; class set: {selection.classes}" if selection.classes else ""
    panels = join(numbers.data["item"].unique(maintain_order=True).to_list())
    return FigureText(
        title=f"{context.measure.capitalize()}: {context.of} against {context.minus}, by head",
        caption=[
            f"Each cell is one head: {context.measure}, {context.of} minus {context.minus}, {held} "
            f"{context.fixed}",
            context.tested,
            f"{layers_text(selection.layers)}; {context.measure}, raw values; queries: "
            f"{selection.queries}; "
            f"{keys_text(selection.keys)}{classes}",
            f"{prompts_text(request, numbers.data)}; paired by prompt",
            *omissions(selection),
        ],
        models=[context.of, context.minus] if context.over == "model" else [context.fixed],
        overview=f"Coloured matrices of layers by heads, a panel for each of {panels}: "
        f"{numbers.settings['value_title'].lower()}. {context.tested}.",
        axes=["x: head, from 0", "y: layer, from 0 at the top"],
        legend=[
            f"colour: from {colours[0]} (negative) over {colours[2]} (0) to {colours[-1]} "
            "(positive)",
            f"dot: q < {LEVEL}",
        ],
        value=show,
        quantity=SHOW[show].lower(),
        places={"item": "{}", "layer": "layer {}", "head": "head {}"},
        split=["item"],
        notes=[
            f"{row['item']}, layer {row['layer']}, head {row['head']}: {number(row[show])} "
            f"(q = {number(row['q'])})"
            for row in numbers.data.filter("significant").iter_rows(named=True)
        ],
        no_differences=f"{context.tested}. Heads with a dot are listed under Notes; the table has "
        "the interval of every head.",
    )


FIGURE = Figure(
    name="effect-heads",
    shows="layers × heads: the difference of a measure; a dot marks heads with q < 0.05",
    needs="an experiment that has this measure, with two models or two conditions, has it",
    numbers=_numbers,
    chart=_chart,
    text=_text,
    options={
        "measure": MEASURE,
        "over": Option(
            help="`over`: compare model or condition; default: models, if there are two",
            known=(None, "model", "condition"),
        ),
        "show": Option(
            help="`show`: difference (default) or effect (standardised)", known=tuple(SHOW)
        ),
    },
    claims=("maps", "map-characters"),
)
