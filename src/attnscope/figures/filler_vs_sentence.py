"""Filler against a random sentence in its place: the attention that the inserted tokens get.

Drawn from `positions` and `tokens`; a panel per model, each with its own scale. This module must
not know how an average is measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import altair as alt
import polars as pl

from attnscope.errors import InputError
from attnscope.figures.assemble import assemble
from attnscope.figures.binning import FINE, PRINT, binned
from attnscope.figures.caption import caption, pairs_said
from attnscope.figures.choice import (
    Choice,
    base_conditions,
    condition_kinds,
    conditions_in_order,
    profiles,
)
from attnscope.figures.describe import Words
from attnscope.figures.figure import Figure, Run
from attnscope.figures.layout import columns_for
from attnscope.figures.numbers import differences, shown
from attnscope.figures.profile import lines_panel, span_of
from attnscope.figures.style import Style
from attnscope.figures.theme import PUBLISHED, Theme
from attnscope.figures.words import count, number

__all__ = ["NEEDS", "draw", "filler_vs_sentence"]

NEEDS = (
    "an experiment with `profile` among its measures and two conditions that insert something, "
    "filler and a sentence, has them, such as the recipe filler-vs-sentence"
)
SPAN, WHOLE = "inserted span", "whole sequence"
Y_TITLE = "Average attention weight"


def filler_vs_sentence(
    frame: pl.DataFrame,
    *,
    theme: Theme = PUBLISHED,
    width: float = 780,
    height: float = 140,
    count_from: int = 0,
    interactive: bool = False,
) -> Any:
    """The chart of `frame`: per model the inserted span above, the whole sequence below.

    Columns: `model`, `layer`, `head`, `panel` ("inserted span" or "whole sequence"), `series` (the
    filler's name first, then the sentence's), `position`, `last`, `value`, `min`, `max`, `role`.
    """
    groups = frame.partition_by(["model", "layer", "head"], maintain_order=True)
    names = frame["series"].unique(maintain_order=True).to_list()
    colours = dict(zip(names, [theme.filler, theme.sentence, *theme.models], strict=False))
    columns = columns_for(len(groups))
    wide = width / columns - (14 if columns > 1 else 0)
    bins = bool((frame["position"] != frame["last"]).any())
    cells = []
    for i, group in enumerate(groups):
        row = group.row(0, named=True)
        named = f"layer {row['layer'] + count_from}, head {row['head'] + count_from}"
        below = group.filter(pl.col("panel") == WHOLE)
        span = span_of(below)
        shared: dict[str, Any] = {
            "width": wide,
            "height": height,
            "y_title": Y_TITLE if i % columns == 0 else "",
            "binned": bins,
            "theme": theme,
        }
        cells.append(
            alt.vconcat(
                lines_panel(
                    group.filter(pl.col("panel") == SPAN),
                    colours,
                    x_title="token of the inserted span",
                    title=[row["model"], named],
                    zoom=f"zoom_{i}" if interactive else None,
                    **shared,
                ),
                lines_panel(
                    below,
                    colours,
                    x_title="token of the whole sequence",
                    spans=[(*span, "inserted")] if span is not None else [],
                    brush=f"brush_{i}" if interactive else None,
                    **shared,
                ),
                spacing=22,
            ).resolve_scale(y="independent")
        )
    return alt.concat(*cells, columns=columns, spacing={"row": 34, "column": 22}).resolve_scale(
        color="shared"
    )


def numbers(positions: pl.DataFrame, tokens: pl.DataFrame, prompt: int | None) -> pl.DataFrame:
    """Both panels' rows, unbinned; of one prompt, or the mean over prompts at each index."""
    place = ["model", "prompt", "condition", "position"]
    rows = positions.join(tokens.select(*place, "role", "text"), on=place, how="left").rename(
        {"average": "value", "condition": "series", "text": "token"}
    )
    if prompt is not None:
        rows = rows.filter(pl.col("prompt") == prompt)
    inserted = rows.filter(pl.col("role") == "filler")
    first = pl.col("position").min().over("model", "prompt", "series", "layer", "head")
    inserted = inserted.with_columns((pl.col("position") - first).alias("position"))
    columns = ["model", "layer", "head", "panel", "series", "position"]
    both = pl.concat(
        [
            inserted.with_columns(pl.lit(SPAN).alias("panel")),
            rows.with_columns(pl.lit(WHOLE).alias("panel")),
        ]
    )
    if prompt is not None:
        return both.select(*columns, "role", "token", "value", pl.lit(1, pl.Int64).alias("n"))
    return (
        both.group_by(columns, maintain_order=True)
        .agg(
            pl.col("role").mode().sort().first(),
            pl.lit(None, pl.String).alias("token"),
            pl.col("value").mean(),
            pl.col("value").count().cast(pl.Int64).alias("n"),
        )
        .select(*columns, "role", "token", "value", "n")
    )


def draw(
    run: Run,
    choice: Choice,
    style: Style,
    *,
    mean: bool = False,
    leave_out_first: bool = False,
    count_from: int = 0,
) -> Figure:
    """The figure of a run: of its first prompt, or, with `mean`, of the mean over all prompts."""
    if count_from not in (0, 1):
        raise InputError(f"count_from must be 0 or 1, not {count_from!r}")
    names = _two(run, choice)
    found, queries, total = profiles(run, replace(choice, conditions=names), NEEDS, per_model=1)
    prompts = sorted(found["prompt"].unique().to_list())
    prompt = None if mean else prompts[0]
    models = found["model"].unique(maintain_order=True).to_list()
    tokens = run.tokens.filter(
        pl.col("condition").is_in(names), pl.col("model").is_in(models)
    ).collect()
    labels = {
        names[0]: "filler" if names[0] == "filler" else f"filler ({names[0]})",
        names[1]: "random sentence" + ("" if names[1] == "sentence" else f" ({names[1]})"),
    }
    full = numbers(found, tokens, prompt).with_columns(pl.col("series").replace_strict(labels))
    if leave_out_first:
        full = full.filter((pl.col("panel") == SPAN) | (pl.col("position") > 0))
    frame, width_of_bin = _binned(full, PRINT, list(labels.values()))
    fine, fine_bin = _binned(full, FINE, list(labels.values()))
    pairs = frame.select("model", "layer", "head").unique(maintain_order=True)
    many = len(prompts)
    title = style.title or "Filler against a random sentence in its place"
    named = pairs_said(pairs, count_from)
    spans = (
        frame.filter(pl.col("panel") == SPAN)
        .group_by("model", "layer", "head", "series", maintain_order=True)
        .agg(pl.col("tokens").sum())
    )
    unequal = spans.group_by("model", "layer", "head").agg(pl.col("tokens").n_unique())
    said = caption(
        run,
        [
            named,
            f"{Y_TITLE}: mean over the later queries that see the token; queries: {queries}; "
            f"not normalised further; conditions: {names[0]} and {names[1]}; a y scale per panel",
            f"Mean over n = {count(many, 'prompt')} at each index (fewer where one is shorter)"
            if mean
            else f"n = 1: prompt {prompt} of {many} in the run"
            if many > 1
            else f"n = 1: prompt {prompt}, the only one",
            "The two spans differ in length" if (unequal["tokens"] > 1).any() else "",
            "First token left out" if leave_out_first else "",
            f"{pairs.height} of {total} heads are shown" if pairs.height < total else "",
            f"Static version: bins of {width_of_bin} tokens, line: mean, band: minimum to maximum"
            if width_of_bin > 1
            else "",
            f"Interactive version: bins of {fine_bin} tokens" if fine_bin > 1 else "",
        ],
        models,
    )
    colours = [style.theme.filler, style.theme.sentence]
    words = Words(
        title=title,
        overview=f"Line charts for {count(pairs.height, 'head')}, a column each: above, the "
        f"inserted span, {names[0]} against {names[1]}; below, the whole sequence, the span "
        "shaded.",
        axes=[
            "x, above: index within the inserted span; below: index in the sequence",
            f"y: {Y_TITLE}, a scale of its own in each panel",
        ],
        legend=[f"{name}: {colour}" for name, colour in zip(labels.values(), colours, strict=True)],
        value="value",
        quantity="average attention weight",
        places={
            "model": "{}",
            "layer": "layer {}",
            "head": "head {}",
            "panel": "{}",
            "series": "{}",
            "position": "position {}",
        },
        split=["model", "layer", "head", "panel", "series"],
        notes=_spread(full, count_from),
        no_differences="The run has no `uniformity` over prompts to compare the two by.",
    )
    width = style.width or 780
    sizes: dict[str, Any] = {
        "theme": style.theme,
        "width": width if pairs.height > 1 else min(width, 620),
        "height": style.height or 140,
        "count_from": count_from,
    }
    return assemble(
        "filler-vs-sentence",
        lambda: filler_vs_sentence(frame, **sizes),
        frame,
        words,
        caption=said,
        style=style,
        width=sizes["width"] + 40,
        differences=_uniformity(run, pairs, names),
        interactive=lambda: filler_vs_sentence(fine, interactive=True, **sizes),
    )


def _two(run: Run, choice: Choice) -> list[str]:
    """Filler and sentence: as asked, else by their kinds."""
    names = conditions_in_order(run, run.cells["condition"].unique())
    variants = [c for c in names if c not in base_conditions(run)]
    if choice.conditions is not None:
        asked = [c for c in choice.conditions if c in variants]
        if len(asked) != 2:
            raise InputError(
                "filler-vs-sentence shows two conditions that insert something; choose two of "
                f"{', '.join(variants) or 'none in this run'}"
            )
        return asked
    kinds = condition_kinds(run)
    sentence = [c for c in variants if kinds.get(c) in ("sentence", "lorem") or "sentence" in c]
    filler = [c for c in variants if c not in sentence]
    if not sentence or not filler:
        raise InputError(
            f"this run has no filler beside a sentence (conditions: {', '.join(names)}); {NEEDS}"
        )
    return [filler[0], sentence[0]]


def _binned(full: pl.DataFrame, limit: int, names: list[str]) -> tuple[pl.DataFrame, int]:
    by = ["model", "layer", "head", "panel", "series", "role"]
    parts, widest = [], 1
    for panel in (SPAN, WHOLE):
        made, width = binned(full.filter(pl.col("panel") == panel), limit, by=by)
        parts.append(made)
        widest = max(widest, width)
    together = shown(pl.concat(parts))
    order = together.select("model", "layer", "head").unique(maintain_order=True).with_row_index()
    series = pl.col("series").replace_strict(
        {s: i for i, s in enumerate(names)}, return_dtype=pl.Int8
    )
    keys = ["model", "layer", "head", "panel", "series", "position"]
    together = together.join(order, on=["model", "layer", "head"]).sort(
        "index", "panel", series, "position"
    )
    columns = [*keys, "last", "role", "token", "value", "min", "max", "tokens", "n"]
    return together.select(columns), widest


def _spread(full: pl.DataFrame, count_from: int) -> list[str]:
    """How even the shown spans are."""
    spans = full.filter(pl.col("panel") == SPAN)
    by = ["model", "layer", "head", "series"]
    even = spans.group_by(by, maintain_order=True).agg(
        pl.col("value").mean().alias("mean"),
        (pl.col("value").std(ddof=0) / pl.col("value").mean()).alias("variation"),
        pl.col("value").count().alias("tokens"),
    )
    return [
        f"{row['model']}, layer {row['layer'] + count_from}, head {row['head'] + count_from}, "
        f"{row['series']}: mean {number(row['mean'])} over {row['tokens']} inserted tokens, "
        f"coefficient of variation {number(row['variation'])}."
        for row in shown(even).iter_rows(named=True)
    ]


def _uniformity(run: Run, pairs: pl.DataFrame, names: list[str]) -> pl.DataFrame | None:
    """Difference of the coefficient of variation, paired by prompt, where the run has it."""
    values = (
        run.values.filter(pl.col("measure") == "uniformity", pl.col("condition").is_in(names))
        .join(pairs.lazy(), on=["model", "layer", "head"], how="semi")
        .with_columns(pl.col("value").fill_nan(None))
        .collect()
    )
    if values.is_empty():
        return None
    values = values.filter(
        pl.col("queries") == values["queries"].first(), pl.col("keys") == values["keys"].first()
    )
    if set(values.filter(pl.col("value").is_not_null())["condition"]) != set(names):
        return None
    found = differences(values, "condition", [(names[0], names[1])], ["model", "layer", "head"])
    order = pairs.with_row_index("rank").select("model", "layer", "head", "rank")
    found = found.join(order, on=["model", "layer", "head"]).sort("rank").drop("rank")
    return found.with_columns(pl.lit("coefficient of variation over the span").alias("panel"))
