"""A difference in every head: layers by heads, with the heads that pass the correction marked.

Drawn from any measure that has heads. This module must not know how it was measured.
"""

from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.caption import keys_said, layers_said, left_out, prompts_said
from attnscope.figures.charts.matrix import head_matrices
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Option, Request
from attnscope.figures.head_panels import MEASURE, of_heads
from attnscope.figures.numbers import LEVEL, Over, in_order, shown
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
class Compared:
    """What is compared, and how."""

    found: ValueRows
    measure: str
    over: Over
    of: str
    minus: str
    fixed: str
    """The condition, or the model, that both are of."""
    tested: str
    """What was tested, in words."""


def _chart(
    frame: pl.DataFrame, style: Style, *, show: str = "difference", value_title: str = "Difference"
) -> Any:
    """A matrix of `layer` by `head` per `item`, dots where `significant`.

    Columns: these, and `difference` or `effect`, whichever is to `show`.
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


def _numbers(asked: Request) -> FigureNumbers[Compared]:
    show = asked.options["show"]
    found, measure = of_heads(asked)
    base = asked.run.experiment.base
    over, of, minus = _pair(found, base, asked.options["over"])
    held = "condition" if over == "model" else "model"
    first = base if base in found.conditions else found.conditions[0]
    fixed = first if over == "model" else found.models[0]
    values = found.frame.filter(pl.col("head").is_not_null(), pl.col(held) == fixed)
    items = found.items
    if asked.choice.items is None and measure == "mass":
        # Of the two that are compared: other conditions may well have tokens of a class.
        absent = without_tokens(values.filter(pl.col(over).is_in([of, minus])), items)
        items = [c for c in items if c not in absent]
        found = replace(found, absent=found.absent + absent)
    if asked.choice.items is None and set(PREFERRED) <= set(items):
        items = list(PREFERRED)
    if items:
        values = values.filter(pl.col("item").is_in(items))
    found = replace(found, frame=values.filter(pl.col(over).is_in([of, minus])))
    defined = values.filter(pl.col("value").is_not_null())
    frame = compare(defined, over=over, pair=(minus, of), **asked.sources.settings)
    frame = frame.with_columns(
        pl.coalesce("item", pl.lit(measure)).alias("item"),
        (pl.col("q") < LEVEL).fill_null(False).alias("significant"),
    )
    if frame["target"].null_count() < frame.height:
        frame = frame.with_columns(pl.format("{} → {}", "item", "target").alias("item"))
        items = frame["item"].unique(maintain_order=True).to_list()
    columns = ["item", "layer", "head", "difference", "effect", "low", "high", "n", "p", "q"]
    frame = in_order(frame.sort("layer", "head"), item=items or [measure])
    frame = shown(frame.select(*columns, "unreliable", "significant"))
    tests = frame["q"].count()
    tested = (
        f"Dots: {frame['significant'].sum()} of {count(tests, 'test')} with q < {LEVEL} (p: "
        f"{TESTED}; Benjamini–Hochberg over layers × heads of a panel)"
        if tests
        else f"No tests: fewer {asked.over} than the {MINIMUM} that a p-value needs"
    )
    return FigureNumbers(
        measures=[measure],
        data=frame,
        settings={"show": show, "value_title": f"{SHOW[show]} of {measure} ({of} minus {minus})"},
        width={1: 480, 2: 640}.get(frame["item"].n_unique(), 800),
        margin=40,
        told=Compared(found, measure, over, of, minus, fixed, tested),
    )


def _pair(found: ValueRows, base: str, over: str | None) -> tuple[Over, str, str]:
    """What is compared: over models, or over conditions; the first, and what is taken from it."""
    variants = [c for c in found.conditions if c != base]
    if over != "condition" and len(found.models) > 1:
        return "model", found.models[1], found.models[0]
    if over != "model" and base in found.conditions and variants:
        return "condition", variants[0], base
    if over != "model" and len(variants) > 1:
        return "condition", variants[1], variants[0]
    raise InputError(
        "a difference needs two models or two conditions; this choice has the models "
        f"{', '.join(found.models)} and the conditions {', '.join(found.conditions)}; `head-map` "
        "shows the values of one",
        code="nothing-to-compare",
        models=found.models,
        conditions=found.conditions,
    )


def _words(made: FigureNumbers[Compared], asked: Request) -> FigureText:
    told, colours, show = made.told, asked.theme.diverging, asked.options["show"]
    found = told.found
    held = "condition" if told.over == "model" else "model"
    classes = f"; class set: {found.classes}" if found.classes else ""
    panels = join(made.data["item"].unique(maintain_order=True).to_list())
    return FigureText(
        title=f"{told.measure.capitalize()}: {told.of} against {told.minus}, head by head",
        caption=[
            f"{told.of} minus {told.minus}, {held} {told.fixed}; {layers_said(found.layers)}, "
            "every head by itself",
            f"{told.measure}, not normalised further; queries: {found.queries}; "
            f"{keys_said(found.keys)}{classes}",
            f"{prompts_said(asked, made.data)}; paired by prompt",
            told.tested,
            *left_out(found),
        ],
        models=[told.of, told.minus] if told.over == "model" else [told.fixed],
        overview=f"Coloured matrices of layers by heads, a panel for each of {panels}: "
        f"{made.settings['value_title'].lower()}. {told.tested}.",
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
            for row in made.data.filter("significant").iter_rows(named=True)
        ],
        no_differences=f"{told.tested}. Heads with a dot are listed under Notes; the interval of "
        "every head is in the table.",
    )


FIGURE = Figure(
    name="effect-heads",
    shows="layers × heads: the difference of a measure; heads with q < 0.05 are dotted",
    needs="an experiment that has this measure, with two models or two conditions, has it",
    numbers=_numbers,
    chart=_chart,
    words=_words,
    options={
        "measure": MEASURE,
        "over": Option(
            said="`over` model, condition",
            known=(None, "model", "condition"),
        ),
        "show": Option(said="`show` difference, effect", known=tuple(SHOW)),
    },
    claims=("maps", "map-characters"),
)
