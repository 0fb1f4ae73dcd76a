"""Compares two models, conditions or classes in each head, with a test for every head."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from attnscope.figures.figure import Figure, Numbers
from attnscope.figures.numbers import LEVEL, in_order, rounded
from attnscope.figures.options import Option
from attnscope.figures.reading import Rows
from attnscope.figures.select import without_tokens
from attnscope.figures.text_format import count, number, upper_first
from attnscope.stats.means import MINIMUM
from attnscope.stats.paired import TESTED, compare

SHOWN = {"difference": "difference", "effect": "standardised effect"}
SHOW = {"show": Option(help="difference (default) or effect (standardised)", known=tuple(SHOWN))}
STATISTICS = ["difference", "effect", "low", "high", "n", "p", "q"]


def compared_by_head(rows: Rows, figure: Figure, over: str, of: str, minus: str) -> Numbers:
    """`of` minus `minus` in each head, a panel for each thing (class) or model."""
    request, selection, measure = rows.request, rows.selection, rows.measures[0]
    sides = pl.col(over).is_in([of, minus])
    values = selection.frame.filter(sides, pl.col("head").is_not_null())
    if over != "item" and request.choice.items is None and measure == "mass":
        # Only the two sides count: other conditions may have tokens of a class.
        absent = without_tokens(values, selection.items)
        values = values.filter(~pl.col("item").is_in(absent))
        selection = replace(selection, absent=selection.absent + absent)
    defined = values.filter(pl.col("value").is_not_null())
    how = {"normalise": rows.normalise, **request.units.settings}
    table = compare(defined, over=over, pair=(minus, of), **how)
    if over != "item":
        thing = pl.coalesce("item", pl.lit(measure))
        target = pl.format("{} → {}", "item", "target")
        thing = pl.when(pl.col("target").is_null()).then(thing).otherwise(target)
        table = table.with_columns(thing.alias("item"))
    panel = figure.by[0]
    order = selection.models if panel == "model" else selection.items
    significant = (pl.col("q") < LEVEL).fill_null(False).alias("significant")
    table = rounded(table.select(*figure.by, *STATISTICS, significant))
    data = in_order(table.sort("layer", "head"), **{panel: order})
    tested = (
        f"Dots: {data['significant'].sum()} of {count(data['q'].count(), 'test')} with q < {LEVEL} "
        f"(p: {TESTED}; Benjamini–Hochberg over layers × heads of a panel)"
        if data["q"].count()
        else f"No tests: a p-value needs at least {MINIMUM} {request.unit_name}"
    )
    show = request.options["show"]
    title = f"{SHOWN[show]} of {rows.words['measure']} ({of} minus {minus})"
    return Numbers(
        data=data,
        selection=replace(selection, frame=values, conditions=[]),
        measures=rows.measures,
        settings={"value": show, "y": upper_first(title), "scale": request.options["scale"]},
        words={**rows.words, "of": of, "minus": minus, "show": SHOWN[show]},
        sentences=[tested, "Differences are paired by prompt"],
        notes=[
            f"{row[panel]}, layer {row['layer']}, head {row['head']}: {number(row[show])} "
            f"(q = {number(row['q'])})"
            for row in data.filter("significant").iter_rows(named=True)
        ],
        text={
            "no_differences": f"{tested}. Heads with a dot are listed under Notes; the table has "
            "the interval of every head."
        },
    )
