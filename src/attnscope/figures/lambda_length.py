"""λ against the length of the filler: how the change grows with what is inserted.

Drawn from `lambda` and the cells' numbers of filler tokens. This module must not know how a slope
is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from attnscope.errors import InputError
from attnscope.figures.assemble import assemble
from attnscope.figures.caption import caption, heads_said, layers_said, prompts_said
from attnscope.figures.choice import Choice, condition_fillers, heads_way, rows
from attnscope.figures.describe import Words
from attnscope.figures.figure import Figure, Run
from attnscope.figures.lambda_heads import NEEDS
from attnscope.figures.layers import spread
from attnscope.figures.layout import columns_for, panel_title, tips
from attnscope.figures.numbers import means, rank, shown
from attnscope.figures.style import Style
from attnscope.figures.theme import PUBLISHED, Theme
from attnscope.figures.words import join
from attnscope.stats.tables import combine as combine_heads

__all__ = ["draw", "lambda_length"]

MOST = 8
"""The most layers shown where none were asked for."""


def lambda_length(
    frame: pl.DataFrame, *, theme: Theme = PUBLISHED, width: float = 780, height: float = 240
) -> Any:
    """The chart of `frame`: λ (`value`) over `filler_tokens`, a line per `layer`, a panel each."""
    names = frame["panel"].unique(maintain_order=True).to_list()
    layers = frame["layer"].unique().sort().to_list()
    columns = columns_for(len(names), 3)
    wide = width / columns - (18 if columns > 1 else 0)
    colour = alt.Color(
        "layer:O",
        scale=alt.Scale(domain=layers, range=theme.series_colours(len(layers))),
        legend=alt.Legend(
            orient="top", title="Layer", titleOrient="left", symbolOpacity=1, columns=8
        ),
    )
    longest = max(frame["filler_tokens"].to_list())
    panels = []
    for i, name in enumerate(names):
        part = frame.filter(pl.col("panel") == name)
        base = alt.Chart(part)
        x = alt.X(
            "filler_tokens:Q",
            title="Filler tokens",
            axis=alt.Axis(grid=False),
            scale=alt.Scale(domain=[0, longest * 1.04], nice=False),
        )
        said = "λ (1: unchanged)" if i % columns == 0 else ""
        y = alt.Y(
            "value:Q",
            title=said,
            axis=alt.Axis(grid=True),
            scale=alt.Scale(domain=spread(frame, 1.0), nice=True, zero=False),
        )
        marks: list[Any] = [
            alt.Chart(alt.InlineData(values=[{}]))
            .mark_rule(style="faint-rule", strokeDash=[5, 3])
            .encode(y=alt.YDatum(1.0))
        ]
        if part["low"].null_count() < part.height:
            marks.append(
                base.mark_area(opacity=0.18).encode(
                    x=x, y=alt.Y("low:Q", title=said), y2="high:Q", color=colour
                )
            )
        line = base.encode(
            x=x,
            y=y,
            color=colour,
            tooltip=tips(
                part, ["panel", "condition", "filler_tokens", "layer", "value", "low", "high", "n"]
            ),
        )
        marks += [
            line.mark_line(strokeWidth=1.6, strokeJoin="round"),
            line.mark_point(filled=True, size=24, opacity=1),
        ]
        if len(names) > 1:
            marks.append(panel_title([name], wide, theme))
        panels.append(alt.layer(*marks).properties(width=wide, height=height))
    return alt.concat(*panels, columns=columns, spacing={"row": 26, "column": 26}).resolve_scale(
        color="shared"
    )


def draw(run: Run, choice: Choice, style: Style, *, combine: str | None = None) -> Figure:
    """The figure of a run with fillers of several lengths."""
    heads = heads_way(run, combine)
    found = rows(run, choice, ["lambda"], NEEDS)
    lengths = run.cells.group_by("model", "condition").agg(
        pl.col("filler_tokens").mean().alias("filler_tokens")
    )
    fillers = condition_fillers(run)
    values = combine_heads(found.frame, heads)
    layers = found.layers
    if choice.layers is None and len(layers) > MOST:
        layers = sorted({layers[round(i * (len(layers) - 1) / (MOST - 1))] for i in range(MOST)})
        values = values.filter(pl.col("layer").is_in(layers))
    frame = (
        means(values, ["model", "condition", "layer"])
        .join(lengths, on=["model", "condition"])
        .with_columns(
            pl.col("condition").replace_strict(fillers, default="filler").alias("filler"),
        )
    )
    # A line is one filler at one place; another token or place is another line, in its own panel.
    several = pl.col("filler_tokens").n_unique().over("model", "filler") > 1
    lone = frame.filter(~several)["condition"].unique().to_list()
    frame = frame.filter(several)
    if frame.is_empty():
        raise InputError(
            "this run has filler of one length only; an experiment with the same filler in several "
            "lengths (conditions with another `count` each) has them"
        )
    drawn = frame["filler"].unique(maintain_order=True).sort().to_list()
    panel = pl.format("{}, {}", "model", "filler") if len(drawn) > 1 else pl.col("model")
    frame = shown(
        frame.sort(rank("model", found.models), "filler", "layer", "filler_tokens").select(
            panel.alias("panel"),
            "condition",
            "filler_tokens",
            "layer",
            "value",
            "low",
            "high",
            "n",
        )
    )
    interval = frame["low"].null_count() < frame.height
    names = frame["panel"].unique(maintain_order=True).to_list()
    said = caption(
        run,
        [
            f"{join(found.models)}, {layers_said(layers)}"
            + (f", of {len(found.layers)} in the run" if len(layers) < len(found.layers) else "")
            + f", {heads_said(run, heads, found.frame, found.sources)}",
            f"Filler: {'; '.join(drawn)}"
            + (
                f"; not of several lengths, so not shown: {join(_in_order(found.conditions, lone))}"
                if lone
                else ""
            ),
            "λ: slope through the origin of the average attention weight with filler on that "
            f"without, over aligned tokens; queries: {found.queries}; keys: {found.keys}; "
            "not normalised further; filler tokens: mean over prompts",
            prompts_said(frame["n"].to_list(), interval=interval)
            + (", drawn as bands" if interval else ""),
            f"{found.not_numbers} undefined values are left out" if found.not_numbers else "",
        ],
        found.models,
    )
    words = Words(
        title=style.title or "λ against the length of the filler",
        overview=f"Lines of λ over the number of filler tokens, a line per layer; panels: "
        f"{', '.join(names)}. A dashed line at 1 is no change.",
        axes=["x: filler tokens", "y: λ"],
        legend=[
            f"layer {layer}: {colour}"
            for layer, colour in zip(layers, style.theme.series_colours(len(layers)), strict=True)
        ],
        value="value",
        quantity="λ",
        places={"panel": "{}", "layer": "layer {}", "filler_tokens": "{} filler tokens"},
        order="filler_tokens",
        split=["panel"],
        no_differences="λ compares two conditions already: 1 is no difference.",
    )
    width = style.width or {1: 520, 2: 720}.get(len(names), 800)
    return assemble(
        "lambda-length",
        lambda: lambda_length(frame, theme=style.theme, width=width, height=style.height or 240),
        frame,
        words,
        caption=said,
        style=style,
        width=width + 50,
    )


def _in_order(conditions: Sequence[str], some: Sequence[str]) -> list[str]:
    return [name for name in conditions if name in some]
