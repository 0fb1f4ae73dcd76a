"""Attention by type of token: stacked bars, a group per layer, models side by side.

Drawn from `mass`. This module must not know how a mass is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import altair as alt
import polars as pl

from attnscope.errors import InputError, unknown
from attnscope.figures.assemble import assemble
from attnscope.figures.caption import caption, heads_said, layers_said, prompts_said
from attnscope.figures.choice import Choice, Rows, heads_way, rows
from attnscope.figures.describe import Words
from attnscope.figures.figure import Figure, Run
from attnscope.figures.layout import CLASS_LABELS, label_of, tips
from attnscope.figures.numbers import differences, means, rank, shown
from attnscope.figures.style import Style
from attnscope.figures.theme import PUBLISHED, Theme
from attnscope.figures.words import join, number
from attnscope.stats.tables import combine, normalise

__all__ = ["NEEDS", "draw", "token_types"]

NEEDS = "an experiment with `mass` among its measures has it, such as the recipe token-types"
TITLES = {
    "mass": "Total attention (sum)",
    "share": "Share of the attention on the shown classes",
    "per-token": "Attention per token of the class",
}
WHISKERS = ("none", "total", "classes")
PREFERRED = ("hash", "star", "whitespace")


def token_types(
    frame: pl.DataFrame,
    *,
    theme: Theme = PUBLISHED,
    whiskers: str = "total",
    counts: bool = False,
    uniform: bool = False,
    y_title: str = TITLES["mass"],
    width: float | None = None,
    height: float = 280,
) -> alt.FacetChart:
    """The chart of `frame`: one row per model, layer and class, and one per total.

    Columns: `model`, `layer`, `class` (or "total"), `bottom`, `top`; for whiskers `whisker_low`
    and `whisker_high`, for counts `tokens` and `bar` (where a bar ends), for the baseline
    `uniform`.
    """
    models = frame["model"].unique(maintain_order=True).to_list()
    layers = frame["layer"].unique(maintain_order=True).to_list()
    names = [c for c in frame["class"].unique(maintain_order=True) if c != "total"]
    step = (width or _width(models, layers)) / len(layers) / len(models)
    bar = max(3.0, step * 0.72)
    turned = max(len(m) for m in models) * theme.size * 0.56 > step
    steep = step < 2.2 * theme.size
    x = alt.X(
        "model:N",
        sort=models,
        title=None,
        axis=alt.Axis(
            labelAngle=(-90 if steep else -35) if turned else 0, ticks=False, labelPadding=5
        ),
        scale=alt.Scale(paddingInner=0.28, paddingOuter=0.28),
    )
    scale = alt.Scale(domain=names, range=theme.class_colours(names))
    labels = {k: v for k, v in CLASS_LABELS.items() if k in names}
    legend = alt.Legend(
        orient="top",
        title=None,
        symbolType="square",
        labelExpr=f"({labels})[datum.label] || datum.label",
    )
    base = alt.Chart()
    single = alt.datum["class"] != "total"
    total = alt.datum["class"] == "total"
    marks: list[Any] = [
        base.transform_filter(single)
        .mark_bar(size=bar)
        .encode(
            x=x,
            y=alt.Y("bottom:Q", title=y_title, axis=alt.Axis(tickCount=6)),
            y2="top:Q",
            color=alt.Color("class:N", scale=scale, legend=legend),
            tooltip=tips(
                frame, ["model", "layer", "class", "value", "low", "high", "n", "tokens", "uniform"]
            ),
        )
    ]
    if uniform:
        marks.append(
            base.transform_filter(total)
            .mark_tick(style="ink", thickness=1, size=min(step, bar * 1.2), opacity=1)
            .encode(x=x, y=alt.Y("uniform:Q"))
        )
    if whiskers != "none":
        which = {"total": ["total"], "classes": names}[whiskers]
        for i, name in enumerate(which):
            shift = (i - (len(which) - 1) / 2) * bar / (len(which) + 1)
            whisker = base.transform_filter(alt.datum["class"] == name).encode(
                x=x, y=alt.Y("whisker_low:Q"), y2="whisker_high:Q"
            )
            marks.append(whisker.mark_rule(style="ink", strokeWidth=1.2, xOffset=shift))
            marks += [
                base.transform_filter(alt.datum["class"] == name)
                .mark_tick(style="ink", thickness=1, size=min(8, bar / 3), xOffset=shift, opacity=1)
                .encode(x=x, y=alt.Y(end))
                for end in ("whisker_low:Q", "whisker_high:Q")
            ]
    if counts:
        for line, name in enumerate(reversed(names)):
            rise = -8 - line * (theme.size - 0.5)
            marks.append(
                base.transform_filter(alt.datum["class"] == name)
                .mark_text(dy=rise, fontSize=theme.size - 1, fontWeight="bold")
                .encode(
                    x=x,
                    y=alt.Y("bar:Q"),
                    text=alt.Text("tokens:Q", format=".3~r"),
                    color=alt.Color("class:N", scale=scale, legend=legend),
                )
            )
    # Where "Layer 27" would run into its neighbour, the number must do.
    roomy = step * len(models) > 5 * theme.size
    return (
        alt.layer(*marks, data=frame)
        .properties(width=step * len(models), height=height)
        .facet(
            column=alt.Column(
                "layer:O",
                sort=layers,
                title=None if roomy else "Layer",
                header=alt.Header(
                    labelOrient="bottom",
                    titleOrient="bottom",
                    labelExpr="'Layer ' + datum.value" if roomy else "datum.value",
                    labelPadding=6,
                ),
            ),
            spacing=max(2, min(14, step / 3)),
        )
    )


def numbers(found: Rows, heads: str, how: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Per prompt: the combined, normalised values with totals; and the rows of the chart."""
    single = normalise(combine(found.frame, heads), how).with_columns(pl.col("head").cast(pl.Int16))
    by = [c for c in single.columns if c not in ("item", "value", "uniform", "tokens")]

    def together(column: str) -> pl.Expr:
        return pl.when(pl.col(column).null_count() == 0).then(pl.col(column).sum()).alias(column)

    total = single.group_by(by, maintain_order=True).agg(
        pl.lit("total").alias("item"), together("value"), together("uniform"), together("tokens")
    )
    values = pl.concat([single, total.select(single.columns)])
    places = ["model", "layer", "item"]
    beside = values.group_by(places).agg(pl.col("uniform").mean(), pl.col("tokens").mean())
    frame = means(values, places).join(beside, on=places, how="left")
    order = [
        rank("layer", found.layers),
        rank("model", found.models),
        rank("item", [*found.items, "total"]),
    ]
    frame = frame.sort(order)
    # The first class of the legend stands on top of the stack.
    is_total = pl.col("item") == "total"
    top = pl.col("value").cum_sum(reverse=True).over("model", "layer")
    stacked = frame.filter(~is_total).with_columns(top.alias("top"))
    totals = frame.filter(is_total).with_columns(pl.col("value").alias("top"))
    frame = pl.concat([stacked, totals]).sort(order)
    frame = frame.with_columns((pl.col("top") - pl.col("value")).alias("bottom"))
    return values, shown(
        frame.rename({"item": "class"})
        .select(
            *("model", "layer", "class", "value", "low", "high", "n", "tokens", "uniform"),
            *("bottom", "top"),
            (pl.col("bottom") + pl.col("low")).alias("whisker_low"),
            (pl.col("bottom") + pl.col("high")).alias("whisker_high"),
        )
        .with_columns(
            pl.max_horizontal("top", "whisker_high").max().over("model", "layer").alias("bar")
        )
    )


def draw(
    run: Run,
    choice: Choice,
    style: Style,
    *,
    whiskers: str = "total",
    counts: bool = False,
    uniform: bool = False,
    combine: str | None = None,
    normalise: str | None = None,
) -> Figure:
    """The figure of a run; `combine` (heads) and `normalise` are the experiment's unless given."""
    if whiskers not in WHISKERS:
        raise unknown("whiskers", whiskers, WHISKERS)
    heads = heads_way(run, combine)
    asked_for = run.experiment.normalise
    how = normalise or (asked_for if asked_for in TITLES else "mass")
    if how not in TITLES:
        raise unknown("normalisation", how, TITLES)
    if how == "per-token" and (uniform or counts):
        raise InputError("per-token attention has neither token counts nor an even-attention bar")
    found = rows(run, choice, ["mass"], NEEDS, base_only=True, fold=True)
    found = _preferred(found, choice)
    values, frame = numbers(found, heads, how)
    pairs = [(b, a) for a, b in combinations(found.models, 2)]
    places = ["layer", "item"]
    paired = (
        differences(values, "model", pairs, places).rename({"item": "class"}) if pairs else None
    )
    if paired is not None:
        paired = paired.sort(
            rank("layer", found.layers), rank("class", [*found.items, "total"]), maintain_order=True
        )
    title = style.title or "Attention by type of token"
    interval = whiskers != "none" and frame["low"].null_count() < frame.height
    what = {
        "mass": "Attention summed over the keys of a class, mean over queries",
        "share": "Attention on the keys of a class, mean over queries, as a share of that on the "
        "shown classes",
        "per-token": "Attention on the keys of a class divided by their number, mean over queries",
    }[how]
    said = caption(
        run,
        [
            f"{join(found.sources)}, {layers_said(found.layers)}, "
            + heads_said(run, heads, found.frame, found.sources),
            f"{what}; queries: {found.queries}; keys: {found.keys}; class set: {found.classes}; "
            f"condition: {', '.join(found.conditions)}",
            prompts_said(frame["n"].to_list(), interval=interval)
            + ("; whiskers on the total of a bar" if interval and whiskers == "total" else "")
            + ("; whiskers on each class" if interval and whiskers == "classes" else ""),
            "Line across a bar: the total under even attention" if uniform else "",
            "Numbers above a bar: mean number of tokens per class" if counts else "",
            f"No text has a token of {join(found.absent, 'or')}" if found.absent else "",
            f"{found.not_numbers} undefined values are left out" if found.not_numbers else "",
        ],
        found.sources,
    )
    if not interval:
        frame = frame.drop("whisker_low", "whisker_high").with_columns(
            pl.col("top").max().over("model", "layer").alias("bar")
        )
    words = Words(
        title=title,
        overview=f"Grouped, stacked bars: a group per layer ({len(found.layers)}), in each a bar "
        f"per model ({', '.join(found.models)}), stacked from bottom to top by class: "
        f"{', '.join(reversed(found.items))}.",
        axes=[
            "x: layers as groups, models within a group",
            f"y: {TITLES[how]}, from 0 to {number(frame['top'].max())}",
        ],
        legend=[
            f"{label_of(c)}: {colour}"
            for c, colour in zip(found.items, style.theme.class_colours(found.items), strict=True)
        ],
        value="value",
        quantity="attention",
        places={"layer": "layer {}", "model": "{}", "class": "{}"},
        order="class",
        parts={
            "a class": pl.col("class") != "total",
            "a whole bar": pl.col("class") == "total",
        },
        no_differences="One model only: there is nothing to compare with."
        if len(found.models) == 1
        else "Nothing is compared.",
    )
    width = style.width or _width(found.models, found.layers)

    def chart() -> Any:
        return token_types(
            frame,
            theme=style.theme,
            whiskers=whiskers if interval else "none",
            counts=counts,
            uniform=uniform,
            y_title=TITLES[how],
            width=width,
            height=style.height or 280,
        )

    return assemble(
        "token-types",
        chart,
        frame,
        words,
        caption=said,
        style=style,
        width=width + 60,
        differences=paired,
    )


def _width(models: Sequence[str], layers: Sequence[int]) -> float:
    bars = len(models) * len(layers)
    return min(720, max(10 * bars, 64 * bars if bars < 6 else 52 * bars))


def _preferred(found: Rows, choice: Choice) -> Rows:
    """The published three classes, where the set has them and no others were asked for."""
    if choice.items is not None or not set(PREFERRED) <= set(found.items):
        return found
    keep = [c for c in PREFERRED if c in found.items]
    return replace(found, items=keep, frame=found.frame.filter(pl.col("item").is_in(keep)))
