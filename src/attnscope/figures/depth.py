"""Draws entropy and first-token mass over layers.

Drawn from `entropy` and `first_token`.
"""

from typing import Any

import polars as pl

from attnscope.figures.caption import heads_text, keys_text, line_caption
from attnscope.figures.charts.common import series_legend
from attnscope.figures.charts.lines import layer_lines
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import COMBINE, Figure, FigureNumbers, Request
from attnscope.figures.numbers import between_models, in_order, means, rounded
from attnscope.figures.select import ValueRows, select
from attnscope.figures.theme import Style
from attnscope.stats.tables import combine, possible

MEASURES = {"entropy": "Entropy (nats)", "first_token": "First-token mass"}
TITLES = {"entropy": "entropy", "first_token": "first-token mass"}
ABOUT = {
    "entropy": "entropy of a query's attention in nats",
    "first_token": "attention of a query to the first token",
}


def _chart(frame: pl.DataFrame, style: Style) -> Any:
    """A panel per `measure`, `value` with `low` and `high` over `layer`, a line per `model`."""
    models = frame["model"].unique(maintain_order=True).to_list()
    return layer_lines(
        frame,
        style,
        dict(zip(models, style.theme.series_colours(len(models)), strict=True)),
        series="model",
        panel="measure",
        y_titles={m: MEASURES.get(m, m) for m in frame["measure"].unique()},
        own_scale=True,
    )


def _numbers(request: Request) -> FigureNumbers[ValueRows]:
    selection = select(request.run, request.choice, list(MEASURES), base_only=True)
    values = combine(selection.frame, request.combine)
    by = ["measure", "model", "layer"]
    each = [
        means(part, by, request.units, possible(part["measure"][0], heads=request.combine))
        for part in values.partition_by("measure", maintain_order=True)
    ]
    frame = rounded(pl.concat(each))
    measures = [m for m in MEASURES if m in set(frame["measure"])]
    return FigureNumbers(
        measures=measures,
        data=in_order(frame, measure=measures, model=selection.models, layer=selection.layers),
        differences=between_models(
            values, selection.models, request.units, measure=measures, layer=selection.layers
        ),
        width=480 if len(measures) == 1 else 740,
        margin=60,
        context=selection,
    )


def _text(numbers: FigureNumbers[ValueRows], request: Request) -> FigureText:
    selection = numbers.context
    measures = numbers.data["measure"].unique(maintain_order=True).to_list()
    return FigureText(
        title=f"{' and '.join(TITLES[m] for m in measures).capitalize()}, by layer",
        caption=line_caption(
            *(
                request,
                numbers.data,
                selection,
                heads_text(request.run, request.combine, selection),
            ),
            f"Each line is one model: {' and '.join(ABOUT[m] for m in measures)}, mean over "
            "queries",
            f"Raw values; queries: {selection.queries}; {keys_text(selection.keys)}; condition: "
            f"{', '.join(selection.conditions)}",
        ),
        models=selection.model_names,
        overview=f"Lines over {len(selection.layers)} layers, a panel per measure "
        f"({', '.join(measures)}), a line per model ({', '.join(selection.models)}).",
        axes=["x: layer, from 0", *[f"y: {MEASURES[m]}" for m in measures]],
        legend=series_legend(selection.models, request.theme),
        quantity="value",
        places={"measure": "{}", "model": "{}", "layer": "layer {}"},
        order="model" if len(selection.models) > 1 else None,
        split=["measure"],
    )


FIGURE = Figure(
    name="depth",
    shows="entropy and first-token mass over layers",
    needs="an experiment with `entropy` and `first_token` among its measures has them",
    numbers=_numbers,
    chart=_chart,
    text=_text,
    options={"combine": COMBINE},
)
