"""What single queries look at, over their places in the text, or over the tokens of an answer.

Drawn from `by_query`. This module must not know how it is measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl

from attnscope.figures.caption import hollow, layers_said, left_out, prompts_said
from attnscope.figures.charts.lines import curves
from attnscope.figures.describe import Words
from attnscope.figures.figure import Asked, Figure, Numbers, Option
from attnscope.figures.numbers import in_order, intervals, means, shown
from attnscope.figures.select import AbsentError, Selection, select
from attnscope.figures.theme import Look
from attnscope.figures.words import join

MEASURES = {
    "query_mass": "Mass",
    "query_weight": "Attention weight",
    "query_entropy": "Entropy (nats)",
}
"""What can be shown, with the name of its axis."""
ALONG = {"text": "Position of the query", "answer": "New token"}
Told = tuple[Selection, list[str]]
"""The rows of the first keys, and every line."""


def _chart(
    frame: pl.DataFrame, look: Look, *, x_title: str = ALONG["text"], y_title: str = "Value"
) -> Any:
    """`value` with `low` and `high` over `position`, a line per `series`, a panel per `panel`."""
    return curves(frame, look, x="position", x_title=x_title, y_title=y_title)


def _numbers(asked: Asked) -> Numbers[Told]:
    measure = _measure(asked)
    table = asked.run.by_query.filter(pl.col("measure") == measure)
    if asked.options["along"] == "answer":
        table = _along_answers(asked, table)
    keys = table.select(pl.col("keys").unique(maintain_order=True)).collect()["keys"].to_list()
    wanted = [asked.choice.keys] if asked.choice.keys is not None else keys
    parts, found = [], None
    for one in wanted:
        choice = replace(asked.choice, keys=one)
        of_keys = select(asked.run, choice, [measure], base_only=True, table=table)
        found = found or of_keys
        named = [pl.col("keys")] if len(wanted) > 1 else []
        if of_keys.frame["item"].n_unique() > 1 or not named:
            named.append(pl.col("item").fill_null(measure))
        series = pl.concat_str(named, separator=", ").alias("series")
        parts.append(of_keys.frame.with_columns(series, pl.col("value").cast(pl.Float64)))
    assert found is not None
    rows = pl.concat(parts)
    lines = rows["series"].unique(maintain_order=True).to_list()
    by = ["model", "series", "position"]
    whole = rows.group_by(*by, "prompt", maintain_order=True).agg(pl.col("value").mean())
    frame = shown(means(whole, by, asked.sources)).rename({"model": "panel"}).sort("position")
    return Numbers(
        data=in_order(frame, panel=found.models, series=lines),
        told=(found, lines),
        settings={"x_title": _across(asked), "y_title": MEASURES[measure]},
        width=560,
        margin=60,
    )


def _measure(asked: Asked) -> str:
    """The one asked for, else the first that the run has."""
    there = asked.run.by_query.select(pl.col("measure").unique()).collect()["measure"].to_list()
    found = [m for m in MEASURES if m in there]
    wanted = asked.options["measure"]
    if wanted is None and found:
        return found[0]
    if wanted not in found:
        raise AbsentError(f"this run has no {wanted or 'numbers of single queries'} (by_query)")
    return str(wanted)


def _along_answers(asked: Asked, table: pl.LazyFrame) -> pl.LazyFrame:
    """The queries that new tokens were predicted from, counted by those tokens, from 1."""
    if asked.run.experiment.bin > 1:
        raise AbsentError("its queries are binned, so they cannot be told by new token")
    cells = asked.run.cells.lazy().select(
        "model", "prompt", "condition", "tokens", "generated_tokens"
    )
    step = pl.col("position") - pl.col("tokens") + pl.col("generated_tokens") + 1
    return (
        table.join(cells, on=["model", "prompt", "condition"], maintain_order="left")
        .filter(pl.col("generated_tokens") > 0)
        .with_columns(step.alias("position"))
        .filter(pl.col("position") >= 1)
        .drop("tokens", "generated_tokens")
    )


def _across(asked: Asked) -> str:
    size = asked.run.experiment.bin
    bins = f" (bins of {size}, by their first)" if size > 1 else ""
    return ALONG[asked.options["along"]] + bins


def _words(made: Numbers[Told], asked: Asked) -> Words:
    found, lines = made.told
    colours = asked.theme.series_colours(len(lines))
    answers = asked.options["along"] == "answer"
    what = made.settings["y_title"].lower()
    late = "later tokens are of longer answers" if answers else "later places of longer texts"
    size = asked.run.experiment.bin
    return Words(
        title="What single queries look at, "
        + ("token by token of the answer" if answers else "over the text"),
        caption=[
            f"{join(found.sources)}, {layers_said(found.layers)}, mean over layers and heads",
            f"{made.settings['y_title']} of single queries"
            + (f", means over {size} positions" if size > 1 else "")
            + f", not normalised further; queries: {found.queries}; "
            f"condition: {', '.join(found.conditions)}",
            prompts_said(asked, made.data, interval=intervals(made.data), drawn=", drawn as bands")
            + f"; {late} alone",
            hollow(made.data),
            *left_out(found),
        ],
        models=found.sources,
        overview=f"Lines over {_across(asked).lower()}, one for each of {join(lines)}.",
        axes=[f"x: {_across(asked).lower()}, from {1 if answers else 0}", f"y: {what}"],
        legend=[f"{line}: {colour}" for line, colour in zip(lines, colours, strict=True)],
        quantity=what,
        places={
            "panel": "{}",
            "series": "{}",
            "position": "new token {}" if answers else "position {}",
        },
        split=["panel"],
        no_differences="Values by query, not differences.",
    )


FIGURE = Figure(
    name="by-query",
    shows="mass, weight or entropy of single queries over the text, or over an answer",
    needs="an experiment with `query_mass`, `query_weight` or `query_entropy` has them",
    numbers=_numbers,
    chart=_chart,
    words=_words,
    options={
        "measure": Option(
            said="`measure` query_mass, query_weight, query_entropy", known=(None, *MEASURES)
        ),
        "along": Option(said="`along` text, answer", known=tuple(ALONG)),
    },
)
