"""Entropy and first-token mass over depth: how spread attention is, and how much a sink takes.

Drawn from `entropy` and `first_token`. This module must not know how they are measured.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import polars as pl

from attnscope.figures.assemble import assemble
from attnscope.figures.caption import caption, heads_said, layers_said, prompts_said
from attnscope.figures.choice import Choice, heads_way, rows
from attnscope.figures.describe import Words
from attnscope.figures.figure import Figure, Run
from attnscope.figures.layers import layer_lines
from attnscope.figures.numbers import differences, means, rank, shown
from attnscope.figures.style import Style
from attnscope.figures.theme import PUBLISHED, Theme
from attnscope.figures.words import join
from attnscope.stats.tables import combine as combine_heads

__all__ = ["NEEDS", "depth", "draw"]

NEEDS = "an experiment with `entropy` and `first_token` among its measures has them"
MEASURES = {"entropy": "Entropy (nats)", "first_token": "First-token mass"}


def depth(
    frame: pl.DataFrame, *, theme: Theme = PUBLISHED, width: float = 760, height: float = 240
) -> Any:
    """The chart of `frame`: a panel per `measure`, `value` over `layer`, a line per `model`."""
    models = frame["model"].unique(maintain_order=True).to_list()
    found = frame["measure"].unique(maintain_order=True).to_list()
    return layer_lines(
        frame,
        dict(zip(models, theme.series_colours(len(models)), strict=True)),
        series="model",
        panel="measure",
        y_titles={m: MEASURES.get(m, m) for m in found},
        theme=theme,
        width=width,
        height=height,
        own_scale=True,
    )


def draw(run: Run, choice: Choice, style: Style, *, combine: str | None = None) -> Figure:
    """The figure of a run."""
    heads = heads_way(run, combine)
    found = rows(run, choice, list(MEASURES), NEEDS, base_only=True, fold=True)
    values = combine_heads(found.frame, heads)
    frame = means(values, ["measure", "model", "layer"])
    measures = [m for m in MEASURES if m in set(frame["measure"])]
    frame = shown(frame).sort(
        rank("measure", measures), rank("model", found.models), rank("layer", found.layers)
    )
    pairs = [(b, a) for a, b in combinations(found.models, 2)]
    paired = differences(values, "model", pairs, ["measure", "layer"]) if pairs else None
    if paired is not None:
        paired = paired.sort(
            rank("measure", measures), rank("layer", found.layers), maintain_order=True
        )
    interval = frame["low"].null_count() < frame.height
    missing = [m for m in MEASURES if m not in measures]
    said = caption(
        run,
        [
            f"{join(found.sources)}, {layers_said(found.layers)}, "
            + heads_said(run, heads, found.frame, found.sources),
            "Entropy of a query's attention in nats, and its attention on the first token, each "
            f"mean over queries; not normalised further; queries: {found.queries}; "
            f"keys: {found.keys}; condition: {', '.join(found.conditions)}",
            prompts_said(frame["n"].to_list(), interval=interval)
            + (", drawn as bands" if interval else ""),
            f"The run has no {' and no '.join(missing)}" if missing else "",
            f"{found.not_numbers} undefined values are left out" if found.not_numbers else "",
        ],
        found.sources,
    )
    words = Words(
        title=style.title or "Entropy and first-token mass, layer by layer",
        overview=f"Lines over {len(found.layers)} layers, a panel per measure "
        f"({', '.join(measures)}), a line per model ({', '.join(found.models)}).",
        axes=["x: layer, from 0", *[f"y: {MEASURES[m]}" for m in measures]],
        legend=[
            f"{m}: {colour}"
            for m, colour in zip(
                found.models, style.theme.series_colours(len(found.models)), strict=True
            )
        ],
        value="value",
        quantity="value",
        places={"measure": "{}", "model": "{}", "layer": "layer {}"},
        order="model" if len(found.models) > 1 else None,
        split=["measure"],
        no_differences="One model only: there is nothing to compare with.",
    )
    width = style.width or (480 if len(measures) == 1 else 740)
    return assemble(
        "depth",
        lambda: depth(frame, theme=style.theme, width=width, height=style.height or 240),
        frame,
        words,
        caption=said,
        style=style,
        width=width + 60,
        differences=paired,
    )
