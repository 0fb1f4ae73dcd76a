"""Attention by type of token: bars, a group per layer, models side by side.

Drawn from `mass`. This module must not know how a mass is measured.
"""

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.caption import left_out, measured, prompts_said, shown_of
from attnscope.figures.charts.bars import bars, bars_width
from attnscope.figures.charts.common import legend_of
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import COMBINE, Figure, FigureNumbers, Option, Request
from attnscope.figures.numbers import between_models, in_order, intervals, means, shown
from attnscope.figures.select import ValueRows, select
from attnscope.figures.text_format import number
from attnscope.measures.measure import Range
from attnscope.stats.resampling import ResamplingUnits
from attnscope.stats.tables import NORMALISE, combine, normalise, possible

PREFERRED = ("hash", "star", "whitespace")
"""The published classes: shown where the set has them and no others were asked for."""
TITLES = {
    "mass": "Total attention (sum)",
    "share": "Share of the attention on the shown classes",
    "per-token": "Attention per token of the class",
    "lift": "Lift (1: no preference)",
}
WHAT = {
    "mass": "Attention summed over the keys of a class, mean over queries",
    "share": "Attention on the keys of a class, mean over queries, as a share of that on the "
    "shown classes",
    "per-token": "Attention on the keys of a class divided by their number, mean over queries",
    "lift": "Lift: the mass of a class divided by its mass if every query spread its attention "
    "evenly over the keys it sees",
}
ADD_UP = ("mass", "share")
"""What may be stacked: the others are not parts of a whole."""


def _numbers(asked: Request) -> FigureNumbers[tuple[ValueRows, str]]:
    options = asked.options
    how = options["normalise"] or asked.run.experiment.normalise
    if how not in ADD_UP and (options["uniform"] or options["counts"]):
        raise InputError(
            f"the options counts and uniform do not work with normalise={how!r}; use "
            f"{' or '.join(ADD_UP)}, or leave them out",
            code="conflicting-options",
            normalise=how,
        )
    found = select(asked.run, asked.choice, ["mass"], base_only=True)
    if asked.choice.items is None and set(PREFERRED) <= set(found.items):
        found = found.only(items=PREFERRED)
    values = normalise(combine(found.frame, asked.heads), how).with_columns(
        pl.col("head").cast(pl.Int16)
    )
    stacked = how in ADD_UP
    if stacked:
        values = pl.concat([values, _totals(values)])
    classes = [*found.items, *(["total"] if stacked else [])]
    within = possible("mass", how, asked.heads)
    frame = _stacked(values, found, classes, stacked, asked.sources, within)
    whiskers = options["whiskers"] if stacked or options["whiskers"] == "none" else "classes"
    interval = whiskers != "none" and intervals(frame)
    if not interval:
        frame = frame.drop("whisker_low", "whisker_high").with_columns(
            pl.col("top").max().over("model", "layer").alias("bar")
        )
    paired = between_models(values, found.models, asked.sources, layer=found.layers, item=classes)
    return FigureNumbers(
        measures=["mass"],
        data=frame,
        differences=None if paired is None else paired.rename({"item": "class"}),
        settings={
            "whiskers": whiskers if interval else "none",
            "counts": options["counts"],
            "uniform": options["uniform"],
            "stacked": stacked,
            "rule": 1.0 if how == "lift" else None,
            "y_title": TITLES[how],
        },
        width=bars_width(found.models, found.layers),
        margin=60,
        told=(found, how),
    )


def _totals(values: pl.DataFrame) -> pl.DataFrame:
    """The classes of a bar together, as the item "total"; undefined where one of them is."""
    by = [c for c in values.columns if c not in ("item", "value", "uniform", "tokens")]

    def together(column: str) -> pl.Expr:
        return pl.when(pl.col(column).null_count() == 0).then(pl.col(column).sum()).alias(column)

    made = values.group_by(by, maintain_order=True).agg(
        pl.lit("total").alias("item"), *map(together, ("value", "uniform", "tokens"))
    )
    return made.select(values.columns)


def _stacked(
    values: pl.DataFrame,
    found: ValueRows,
    classes: list[str],
    stacked: bool,
    sources: ResamplingUnits,
    within: Range,
) -> pl.DataFrame:
    """Means with where each part of a bar begins and ends."""
    places = ["model", "layer", "item"]
    beside = values.group_by(places).agg(pl.col("uniform").mean(), pl.col("tokens").mean())
    frame = means(values, places, sources, within).join(beside, on=places, how="left")
    frame = in_order(frame, layer=found.layers, model=found.models, item=classes)
    top = pl.col("value")
    if stacked:
        # The first class of the legend stands on top of the stack.
        part = pl.when(pl.col("item") != "total").then(pl.col("value"))
        height = part.cum_sum(reverse=True).over("model", "layer")
        top = pl.when(pl.col("item") == "total").then(pl.col("value")).otherwise(height)
    frame = frame.with_columns(top.alias("top")).with_columns(
        (pl.col("top") - pl.col("value")).alias("bottom")
    )
    ends = [(pl.col("bottom") + pl.col(end)).alias(f"whisker_{end}") for end in ("low", "high")]
    bar = pl.max_horizontal("top", "whisker_high").max().over("model", "layer").alias("bar")
    columns = ["model", "layer", "class", "value", "low", "high", "n", "tokens", "uniform"]
    columns.append("unreliable")
    frame = frame.rename({"item": "class"}).select(*columns, "bottom", "top", *ends)
    return shown(frame.with_columns(bar))


def _words(made: FigureNumbers[tuple[ValueRows, str]], asked: Request) -> FigureText:
    (found, how), options = made.told, asked.options
    whiskers = made.settings["whiskers"]
    on = {"total": "; whiskers on the total of a bar", "classes": "; whiskers on each class"}
    stacked = made.settings["stacked"]
    within = (
        f"stacked from bottom to top by class: {', '.join(reversed(found.items))}"
        if stacked
        else f"side by side by class: {', '.join(found.items)}"
    )
    return FigureText(
        title="Attention by type of token",
        caption=[
            shown_of(asked.run, asked.heads, found),
            f"{WHAT[how]}; {measured(found)}",
            prompts_said(asked, made.data, interval=whiskers != "none") + on.get(whiskers, ""),
            "Line across a bar: the total under uniform attention" if options["uniform"] else "",
            "Numbers above a bar: mean number of tokens per class" if options["counts"] else "",
            *left_out(found),
        ],
        models=found.sources,
        overview=f"Grouped{', stacked' if stacked else ''} bars: a group per layer "
        f"({len(found.layers)}), in each a bar per model ({', '.join(found.models)}), {within}.",
        axes=[
            "x: layers as groups, models within a group",
            f"y: {TITLES[how]}, from 0 to {number(made.data['top'].max())}",
        ],
        legend=legend_of(found.items, asked.theme.class_colours(found.items)),
        quantity="attention" if how != "lift" else "lift",
        places={"layer": "layer {}", "model": "{}", "class": "{}"},
        order="class",
        parts={"a class": pl.col("class") != "total", "a whole bar": pl.col("class") == "total"},
    )


FIGURE = Figure(
    name="token-types",
    shows="bars: layers as groups, models side by side",
    needs="an experiment with `mass` among its measures has it, such as the recipe token-types",
    numbers=_numbers,
    chart=bars,
    words=_words,
    height=280,
    options={
        "whiskers": Option(
            said="`whiskers` total, classes, none",
            known=("none", "total", "classes"),
            default="total",
        ),
        "counts": Option(said="`counts`", known=(False, True)),
        "uniform": Option(
            said="`uniform` (the total under uniform attention)", known=(False, True)
        ),
        "combine": COMBINE,
        "normalise": Option(
            said="`normalise` mass, share (stacked), per-token, lift (side by side)",
            known=(None, *NORMALISE),
        ),
    },
    claims=("maps", "map-characters"),
)
