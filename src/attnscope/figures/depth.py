"""Entropy and first-token mass over depth: how spread attention is, and how much a sink takes.

Drawn from `entropy` and `first_token`. This module must not know how they are measured.
"""

from typing import Any

import polars as pl

from attnscope.figures.caption import heads_said, keys_said, line_caption
from attnscope.figures.charts.common import series_legend
from attnscope.figures.charts.lines import layer_lines
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import COMBINE, Figure, FigureNumbers, Request
from attnscope.figures.numbers import between_models, in_order, means, shown
from attnscope.figures.select import ValueRows, select
from attnscope.figures.theme import Style
from attnscope.stats.tables import combine, possible

MEASURES = {"entropy": "Entropy (nats)", "first_token": "First-token mass"}
TITLES = {"entropy": "entropy", "first_token": "first-token mass"}
ABOUT = {
    "entropy": "Entropy of a query's attention in nats",
    "first_token": "attention of a query on the first token",
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


def _numbers(asked: Request) -> FigureNumbers[ValueRows]:
    found = select(asked.run, asked.choice, list(MEASURES), base_only=True)
    values = combine(found.frame, asked.heads)
    by = ["measure", "model", "layer"]
    each = [
        means(part, by, asked.sources, possible(part["measure"][0], heads=asked.heads))
        for part in values.partition_by("measure", maintain_order=True)
    ]
    frame = shown(pl.concat(each))
    measures = [m for m in MEASURES if m in set(frame["measure"])]
    return FigureNumbers(
        measures=measures,
        data=in_order(frame, measure=measures, model=found.models, layer=found.layers),
        differences=between_models(
            values, found.models, asked.sources, measure=measures, layer=found.layers
        ),
        width=480 if len(measures) == 1 else 740,
        margin=60,
        told=found,
    )


def _words(made: FigureNumbers[ValueRows], asked: Request) -> FigureText:
    found = made.told
    measures = made.data["measure"].unique(maintain_order=True).to_list()
    return FigureText(
        title=f"{' and '.join(TITLES[m] for m in measures).capitalize()}, layer by layer",
        caption=line_caption(
            *(asked, made.data, found, heads_said(asked.run, asked.heads, found)),
            f"{' and '.join(ABOUT[m] for m in measures)}, mean over queries; not normalised "
            f"further; queries: {found.queries}; "
            f"{keys_said(found.keys)}; condition: {', '.join(found.conditions)}",
        ),
        models=found.sources,
        overview=f"Lines over {len(found.layers)} layers, a panel per measure "
        f"({', '.join(measures)}), a line per model ({', '.join(found.models)}).",
        axes=["x: layer, from 0", *[f"y: {MEASURES[m]}" for m in measures]],
        legend=series_legend(found.models, asked.theme),
        quantity="value",
        places={"measure": "{}", "model": "{}", "layer": "layer {}"},
        order="model" if len(found.models) > 1 else None,
        split=["measure"],
    )


FIGURE = Figure(
    name="depth",
    shows="entropy and first-token mass over layers",
    needs="an experiment with `entropy` and `first_token` among its measures has them",
    numbers=_numbers,
    chart=_chart,
    words=_words,
    options={"combine": COMBINE},
)
