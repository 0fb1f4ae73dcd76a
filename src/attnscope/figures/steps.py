"""Attention step by step while a model answers: to each region, in the query of every new token.

Drawn from `step_mass`. This module must not know how it is measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl

from attnscope.figures.caption import hollow, layers_said, left_out, prompts_said
from attnscope.figures.charts.lines import curves
from attnscope.figures.describe import Words
from attnscope.figures.figure import Asked, Figure, Numbers
from attnscope.figures.numbers import in_order, intervals, means, shown
from attnscope.figures.select import Selection, select
from attnscope.figures.theme import Look
from attnscope.figures.words import join

Told = tuple[Selection, list[str]]
"""The rows of the first keys, and every line."""


def _chart(frame: pl.DataFrame, look: Look) -> Any:
    """`value` with `low` and `high` over `step`, a line per `series`, a panel per `panel`."""
    return curves(frame, look, x="step", x_title="New token", y_title="Mass")


def _numbers(asked: Asked) -> Numbers[Told]:
    measured = asked.run.values.filter(pl.col("measure") == "step_mass")
    keys = measured.select(pl.col("keys").unique(maintain_order=True)).collect()["keys"].to_list()
    wanted = [asked.choice.keys] if asked.choice.keys is not None else keys or [None]
    parts, found = [], None
    for one in wanted:
        of_keys = select(asked.run, replace(asked.choice, keys=one), ["step_mass"], base_only=True)
        found = found or of_keys
        named = [pl.col("keys")] if len(wanted) > 1 else []
        if len(of_keys.items) > 1 or not named:
            named.append(pl.col("item"))
        series = pl.concat_str(named, separator=", ").alias("series")
        parts.append(of_keys.frame.with_columns(series))
    assert found is not None
    rows = pl.concat(parts).with_columns(pl.col("target").cast(pl.Int64).alias("step"))
    lines = rows["series"].unique(maintain_order=True).to_list()
    by = ["model", "series", "step"]
    whole = rows.group_by(*by, "prompt", maintain_order=True).agg(pl.col("value").mean())
    frame = shown(means(whole, by, asked.sources)).rename({"model": "panel"}).sort("step")
    frame = in_order(frame, panel=found.models, series=lines)
    return Numbers(data=frame, told=(found, lines), width=560, margin=60)


def _words(made: Numbers[Told], asked: Asked) -> Words:
    found, lines = made.told
    colours = asked.theme.series_colours(len(lines))
    return Words(
        title="Attention while the model answers, token by token",
        caption=[
            f"{join(found.sources)}, {layers_said(found.layers)}, mean over layers and all heads",
            "Mass of the keys in the one query that a new token is predicted from, not normalised "
            f"further; queries: {found.queries}; condition: {', '.join(found.conditions)}",
            prompts_said(asked, made.data, interval=intervals(made.data), drawn=", drawn as bands")
            + "; later tokens are of longer answers alone",
            hollow(made.data),
            *left_out(found, " (answers that were over)"),
        ],
        models=found.sources,
        overview=f"Lines over the tokens of the answer, one for each of {join(lines)}.",
        axes=["x: new token, from 1", "y: mass"],
        legend=[f"{line}: {colour}" for line, colour in zip(lines, colours, strict=True)],
        quantity="mass",
        places={"panel": "{}", "series": "{}", "step": "new token {}"},
        split=["panel"],
        no_differences="Values by token, not differences.",
    )


FIGURE = Figure(
    name="steps",
    shows="mass of regions or classes over the tokens of an answer",
    needs="an experiment with `step_mass` among its measures has it",
    numbers=_numbers,
    chart=_chart,
    words=_words,
)
