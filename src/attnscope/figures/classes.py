"""Every class of tokens over all layers, as lines or as a stacked area: its mass, or its lift.

Drawn from `mass`. This module must not know how a mass is measured.
"""

from typing import Any

import polars as pl

from attnscope.figures.caption import hollow, left_out, measured, prompts_said, shown_of
from attnscope.figures.charts.common import legend_of
from attnscope.figures.charts.lines import layer_areas, layer_lines
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import COMBINE, Figure, FigureNumbers, Option, Request
from attnscope.figures.numbers import between_models, in_order, intervals, means, shown
from attnscope.figures.select import ValueRows, select
from attnscope.figures.text_format import number
from attnscope.figures.theme import Style
from attnscope.stats.tables import combine, normalise, possible

NEEDS = "an experiment with `mass` among its measures has it, such as the recipe token-types"


def chart(
    frame: pl.DataFrame,
    style: Style,
    *,
    form: str = "lines",
    y_title: str = "Attention mass",
    rule: float | None = None,
) -> Any:
    """A panel per `model`, `value` over `layer` for each `class`.

    Columns: `model`, `layer`, `class`, `value`, `low`, `high`, and for areas `bottom`, `top`.
    """
    names = frame["class"].unique(maintain_order=True).to_list()
    colours = dict(zip(names, style.theme.class_colours(names), strict=True))
    titles = dict.fromkeys(frame["model"].unique(maintain_order=True), y_title)
    shared: dict[str, Any] = {"series": "class", "panel": "model", "y_titles": titles}
    if form == "area":
        return layer_areas(frame, style, colours, **shared)
    return layer_lines(frame, style, colours, rule=rule, **shared)


def by_class(
    asked: Request, how: str, form: str = "lines", **settings: Any
) -> FigureNumbers[ValueRows]:
    """Means per model, layer and class, and the differences between models."""
    found = select(asked.run, asked.choice, ["mass"], base_only=True)
    values = normalise(combine(found.frame, asked.heads), how)
    frame = means(
        values, ["model", "layer", "item"], asked.sources, possible("mass", how, asked.heads)
    ).rename({"item": "class"})
    orders: dict[str, list[Any]] = {
        "model": found.models,
        "class": found.items,
        "layer": found.layers,
    }
    frame = in_order(frame, **orders)
    if form == "area":
        # The first class of the legend stands on top.
        top = pl.col("value").cum_sum(reverse=True).over("model", "layer")
        frame = frame.with_columns(top.alias("top"))
        frame = frame.with_columns((pl.col("top") - pl.col("value")).alias("bottom"))
    frame = shown(frame)
    paired = between_models(
        values, found.models, asked.sources, layer=found.layers, item=found.items
    )
    return FigureNumbers(
        measures=["mass"],
        data=frame,
        differences=None if paired is None else paired.rename({"item": "class"}),
        settings={"form": form, **settings},
        width={1: 480, 2: 700}.get(len(found.models), 800),
        told=found,
    )


def words(made: FigureNumbers[ValueRows], asked: Request, *, what: str, **said: Any) -> FigureText:
    """What the figures of classes over layers say alike; `what` was measured."""
    found = made.told
    interval = made.settings["form"] == "lines" and intervals(made.data)
    return FigureText(
        caption=[
            shown_of(asked.run, asked.heads, found),
            f"{what}; {measured(found)}",
            prompts_said(asked, made.data, interval=interval, drawn=", drawn as bands"),
            hollow(made.data) if interval else "",
            *left_out(found),
        ],
        models=found.sources,
        legend=legend_of(found.items, asked.theme.class_colours(found.items)),
        places={"model": "{}", "layer": "layer {}", "class": "{}"},
        order="class",
        split=["model"],
        **said,
    )


def _words(made: FigureNumbers[ValueRows], asked: Request) -> FigureText:
    area = asked.options["form"] == "area"
    what = "Stacked areas" if area else "A line per class, its 95 % interval as a band"
    return words(
        made,
        asked,
        what="Attention summed over the keys of a class, mean over queries (mass)",
        title="Attention to every class of tokens, layer by layer",
        overview=f"{what}, over {len(made.told.layers)} layers; a panel per model: "
        f"{', '.join(made.told.models)}.",
        axes=["x: layer, from 0", f"y: Attention mass, up to {number(made.data['value'].max())}"],
        quantity="mass",
    )


FIGURE = Figure(
    name="classes",
    shows="mass of every class over layers",
    needs=NEEDS,
    numbers=lambda asked: by_class(asked, "mass", asked.options["form"]),
    chart=chart,
    words=_words,
    height=260,
    options={
        "form": Option(said="`form` lines, area", known=("lines", "area")),
        "combine": COMBINE,
    },
)
