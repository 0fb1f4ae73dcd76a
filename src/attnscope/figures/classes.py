"""Draws the mass or lift of every token class over layers, as lines or as a stacked area.

Drawn from `mass`.
"""

from typing import Any

import polars as pl

from attnscope.figures.caption import hollow, omissions, prompts_text, scope_text, settings_text
from attnscope.figures.charts.common import legend_of
from attnscope.figures.charts.lines import layer_areas, layer_lines
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import COMBINE, Figure, FigureNumbers, Option, Request
from attnscope.figures.numbers import between_models, in_order, intervals, means, rounded
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
    request: Request, how: str, form: str = "lines", **settings: Any
) -> FigureNumbers[ValueRows]:
    """Means per model, layer and class, and the differences between models."""
    selection = select(request.run, request.choice, ["mass"], base_only=True)
    values = normalise(combine(selection.frame, request.combine), how)
    frame = means(
        values, ["model", "layer", "item"], request.units, possible("mass", how, request.combine)
    ).rename({"item": "class"})
    orders: dict[str, list[Any]] = {
        "model": selection.models,
        "class": selection.items,
        "layer": selection.layers,
    }
    frame = in_order(frame, **orders)
    if form == "area":
        # The first class of the legend is on top.
        top = pl.col("value").cum_sum(reverse=True).over("model", "layer")
        frame = frame.with_columns(top.alias("top"))
        frame = frame.with_columns((pl.col("top") - pl.col("value")).alias("bottom"))
    frame = rounded(frame)
    paired = between_models(
        values, selection.models, request.units, layer=selection.layers, item=selection.items
    )
    return FigureNumbers(
        measures=["mass"],
        data=frame,
        differences=None if paired is None else paired.rename({"item": "class"}),
        settings={"form": form, **settings},
        width={1: 480, 2: 700}.get(len(selection.models), 800),
        context=selection,
    )


def class_text(
    numbers: FigureNumbers[ValueRows], request: Request, *, what: str, **fields: Any
) -> FigureText:
    """The text of a figure of classes over layers; `what` is its first sentence."""
    selection = numbers.context
    interval = numbers.settings["form"] == "lines" and intervals(numbers.data)
    return FigureText(
        caption=[
            what,
            f"{scope_text(request.run, request.combine, selection)}; {settings_text(selection)}",
            prompts_text(request, numbers.data, interval=interval, drawn=", drawn as bands"),
            hollow(numbers.data) if interval else "",
            *omissions(selection),
        ],
        models=selection.model_names,
        legend=legend_of(selection.items, request.theme.class_colours(selection.items)),
        places={"model": "{}", "layer": "layer {}", "class": "{}"},
        order="class",
        split=["model"],
        **fields,
    )


def _text(numbers: FigureNumbers[ValueRows], request: Request) -> FigureText:
    area = request.options["form"] == "area"
    what = "Stacked areas" if area else "A line per class, its 95 % interval as a band"
    return class_text(
        numbers,
        request,
        what="Each line is the mass of one token class: attention summed over its keys, mean over "
        "queries",
        title="Attention to each token class, by layer",
        overview=f"{what}, over {len(numbers.context.layers)} layers; a panel per model: "
        f"{', '.join(numbers.context.models)}.",
        axes=[
            "x: layer, from 0",
            f"y: Attention mass, up to {number(numbers.data['value'].max())}",
        ],
        quantity="mass",
    )


FIGURE = Figure(
    name="classes",
    shows="mass of each token class over layers",
    needs=NEEDS,
    numbers=lambda request: by_class(request, "mass", request.options["form"]),
    chart=chart,
    text=_text,
    height=260,
    options={
        "form": Option(help="`form`: lines (default) or area", known=("lines", "area")),
        "combine": COMBINE,
    },
)
