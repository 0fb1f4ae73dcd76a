"""Draws attention by token class as bars: a group per layer, models side by side.

Drawn from `mass`.
"""

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.caption import omissions, prompts_text, scope_text, settings_text
from attnscope.figures.charts.bars import bars, bars_width
from attnscope.figures.charts.common import legend_of
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import COMBINE, Figure, FigureNumbers, Option, Request
from attnscope.figures.numbers import between_models, in_order, intervals, means, rounded
from attnscope.figures.select import ValueRows, select
from attnscope.figures.text_format import number
from attnscope.measures.measure import Range
from attnscope.stats.resampling import ResamplingUnits
from attnscope.stats.tables import NORMALISE, combine, normalise, possible

PREFERRED = ("hash", "star", "whitespace")
"""The published classes: the default if the class set has them."""
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
"""Normalisations that may be stacked, because their parts add up."""


def _numbers(request: Request) -> FigureNumbers[tuple[ValueRows, str]]:
    options = request.options
    how = options["normalise"] or request.run.experiment.normalise
    if how not in ADD_UP and (options["uniform"] or options["counts"]):
        raise InputError(
            f"the options counts and uniform do not work with normalise={how!r}; use "
            f"{' or '.join(ADD_UP)}, or leave them out",
            code="conflicting-options",
            normalise=how,
        )
    selection = select(request.run, request.choice, ["mass"], base_only=True)
    if request.choice.items is None and set(PREFERRED) <= set(selection.items):
        selection = selection.restrict(items=PREFERRED)
    values = normalise(combine(selection.frame, request.combine), how).with_columns(
        pl.col("head").cast(pl.Int16)
    )
    stacked = how in ADD_UP
    if stacked:
        values = pl.concat([values, _totals(values)])
    classes = [*selection.items, *(["total"] if stacked else [])]
    within = possible("mass", how, request.combine)
    frame = _stacked(values, selection, classes, stacked, request.units, within)
    whiskers = options["whiskers"] if stacked or options["whiskers"] == "none" else "classes"
    interval = whiskers != "none" and intervals(frame)
    if not interval:
        frame = frame.drop("whisker_low", "whisker_high").with_columns(
            pl.col("top").max().over("model", "layer").alias("bar")
        )
    paired = between_models(
        values, selection.models, request.units, layer=selection.layers, item=classes
    )
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
        width=bars_width(selection.models, selection.layers),
        margin=60,
        context=(selection, how),
    )


def _totals(values: pl.DataFrame) -> pl.DataFrame:
    """The sum of the classes of a bar as the item "total"; undefined if one of them is."""
    by = [c for c in values.columns if c not in ("item", "value", "uniform", "tokens")]

    def together(column: str) -> pl.Expr:
        return pl.when(pl.col(column).null_count() == 0).then(pl.col(column).sum()).alias(column)

    totals = values.group_by(by, maintain_order=True).agg(
        pl.lit("total").alias("item"), *map(together, ("value", "uniform", "tokens"))
    )
    return totals.select(values.columns)


def _stacked(
    values: pl.DataFrame,
    selection: ValueRows,
    classes: list[str],
    stacked: bool,
    units: ResamplingUnits,
    within: Range,
) -> pl.DataFrame:
    """Means, with the start and the end of each part of a bar."""
    places = ["model", "layer", "item"]
    extra = values.group_by(places).agg(pl.col("uniform").mean(), pl.col("tokens").mean())
    frame = means(values, places, units, within).join(extra, on=places, how="left")
    frame = in_order(frame, layer=selection.layers, model=selection.models, item=classes)
    top = pl.col("value")
    if stacked:
        # The first class of the legend is on top of the stack.
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
    return rounded(frame.with_columns(bar))


def _text(numbers: FigureNumbers[tuple[ValueRows, str]], request: Request) -> FigureText:
    (selection, how), options = numbers.context, request.options
    whiskers = numbers.settings["whiskers"]
    on = {"total": "; whiskers on the total of a bar", "classes": "; whiskers on each class"}
    stacked = numbers.settings["stacked"]
    within = (
        f"stacked from bottom to top by class: {', '.join(reversed(selection.items))}"
        if stacked
        else f"side by side by class: {', '.join(selection.items)}"
    )
    return FigureText(
        title="Attention to each token class, by layer",
        caption=[
            f"Each bar is one model in one layer. {WHAT[how]}",
            f"{scope_text(request.run, request.combine, selection)}; {settings_text(selection)}",
            prompts_text(request, numbers.data, interval=whiskers != "none") + on.get(whiskers, ""),
            "Line across a bar: the total under uniform attention" if options["uniform"] else "",
            "Numbers above a bar: mean number of tokens per class" if options["counts"] else "",
            *omissions(selection),
        ],
        models=selection.model_names,
        overview=f"Grouped{', stacked' if stacked else ''} bars: a group per layer "
        f"({len(selection.layers)}), in each a bar per model ({', '.join(selection.models)}), "
        f"{within}.",
        axes=[
            "x: layers as groups, models within a group",
            f"y: {TITLES[how]}, from 0 to {number(numbers.data['top'].max())}",
        ],
        legend=legend_of(selection.items, request.theme.class_colours(selection.items)),
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
    text=_text,
    height=280,
    options={
        "whiskers": Option(
            help="`whiskers`: total (default), classes or none",
            known=("none", "total", "classes"),
            default="total",
        ),
        "counts": Option(help="`counts`: numbers of tokens above the bars", known=(False, True)),
        "uniform": Option(help="`uniform`: the total under uniform attention", known=(False, True)),
        "combine": COMBINE,
        "normalise": Option(
            help="`normalise`: mass or share (stacked), per-token or lift (side by side); "
            "default: as in "
            "the experiment",
            known=(None, *NORMALISE),
        ),
    },
    claims=("maps", "map-characters"),
)
