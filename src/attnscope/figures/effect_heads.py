"""A difference in every head: layers by heads, with the heads that pass the correction marked.

Drawn from any measure that has heads. This module must not know how it was measured.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from attnscope.errors import InputError, unknown
from attnscope.figures.assemble import assemble
from attnscope.figures.caption import caption, layers_said
from attnscope.figures.choice import Choice, base_conditions, rows
from attnscope.figures.describe import Words
from attnscope.figures.figure import Figure, Run
from attnscope.figures.matrix import matrices
from attnscope.figures.numbers import Over, rank, shown
from attnscope.figures.style import Style
from attnscope.figures.theme import PUBLISHED, Theme
from attnscope.figures.words import count, join, number
from attnscope.stats.paired import MINIMUM, compare

__all__ = ["NEEDS", "draw", "effect_heads"]

NEEDS = "an experiment that has this measure, with two models or two conditions, has it"
LEVEL = 0.05
SHOW = {"difference": "Difference", "effect": "Standardised effect"}
PREFERRED = ("hash", "star", "whitespace")


def effect_heads(
    frame: pl.DataFrame,
    *,
    show: str = "difference",
    value_title: str = "Difference",
    theme: Theme = PUBLISHED,
    width: float = 780,
) -> Any:
    """The chart of `frame`: a matrix of `layer` by `head` per `item`, dots where `significant`."""
    most = max((abs(v) for v in frame[show].drop_nulls()), default=0.0) or 1.0
    return matrices(
        frame,
        x="head",
        y="layer",
        panel="item",
        x_order=frame["head"].unique().sort().to_list(),
        y_order=frame["layer"].unique().sort().to_list(),
        x_title="Head",
        y_title="Layer",
        value=show,
        value_title=value_title,
        domain=[-most, -most / 2, 0, most / 2, most],
        colours=theme.diverging,
        theme=theme,
        width=width,
        marked="significant",
    )


def draw(
    run: Run,
    choice: Choice,
    style: Style,
    *,
    measure: str = "mass",
    over: str | None = None,
    show: str = "difference",
) -> Figure:
    """The figure of a run: models compared, or where there is one, its variant with the base."""
    if show not in SHOW:
        raise unknown("quantity to show", show, SHOW)
    known = run.values.select(pl.col("measure").unique()).collect()["measure"].sort().to_list()
    if measure not in known and measure == "mass" and "entropy" in known:
        measure = "entropy"
    if measure not in known:
        raise InputError(f"this run has no {measure} (it has {', '.join(known)}); {NEEDS}")
    found = rows(run, choice, [measure], NEEDS)
    values = found.frame.filter(pl.col("head").is_not_null())
    if values.is_empty():
        raise InputError(f"{measure} has no heads: it is a number of the whole layer")
    kind, of, minus = _pair(run, found.models, found.conditions, over)
    if kind == "model":
        fixed = next(
            (c for c in found.conditions if c in base_conditions(run)), found.conditions[0]
        )
        values = values.filter(pl.col("condition") == fixed)
    else:
        fixed = found.models[0]
        values = values.filter(pl.col("model") == fixed)
    items, absent = found.items, found.absent
    if choice.items is None and measure == "mass":
        # Of the two that are compared: other conditions may well have tokens of a class.
        two = values.filter(pl.col(kind).is_in([of, minus]))
        tokens = dict(two.group_by("item").agg(pl.col("tokens").max()).iter_rows())
        there = [name for name in items if tokens.get(name) != 0]
        if there:
            absent = absent + [name for name in items if name not in there]
            items = there
            values = values.filter(pl.col("item").is_in(items))
    if choice.items is None and set(PREFERRED) <= set(items):
        items = list(PREFERRED)
        values = values.filter(pl.col("item").is_in(items))
    frame = compare(
        values.filter(pl.col("value").is_not_null()), over=kind, pair=(minus, of)
    ).with_columns(
        pl.coalesce("item", pl.lit(measure)).alias("item"),
        (pl.col("q") < LEVEL).fill_null(False).alias("significant"),
    )
    if frame["target"].null_count() < frame.height:
        frame = frame.with_columns(pl.format("{} → {}", "item", "target").alias("item"))
        items = frame["item"].unique(maintain_order=True).to_list()
    order = [rank("item", items or [measure]), pl.col("layer"), pl.col("head")]
    columns = ["item", "layer", "head", "difference", "effect", "low", "high", "n", "p", "q"]
    frame = shown(frame.sort(order).select(*columns, "significant"))
    tests = frame["q"].count()
    hits = frame.filter("significant")
    few = frame["n"].max()
    assert isinstance(few, int)
    tested = (
        f"Dots: {hits.height} of {count(tests, 'test')} with q < {LEVEL} (sign-flip permutation "
        "tests, Benjamini–Hochberg over layers × heads of a panel)"
        if tests
        else f"No tests: {count(few, 'prompt')} are fewer than the {MINIMUM} that a p-value needs"
    )
    said = caption(
        run,
        [
            f"{of} minus {minus}, {'condition' if kind == 'model' else 'model'} {fixed}; "
            f"{layers_said(found.layers)}, every head by itself",
            f"{measure}, not normalised further; queries: {found.queries}; keys: {found.keys}"
            + (f"; class set: {found.classes}" if found.classes else ""),
            f"n = {count(few, 'prompt')}, paired by prompt",
            tested,
            f"No text has a token of {join(absent, 'or')}" if absent else "",
            f"{found.not_numbers} undefined values are left out" if found.not_numbers else "",
        ],
        [of, minus] if kind == "model" else [fixed],
    )
    value_title = f"{SHOW[show]} of {measure} ({of} minus {minus})"
    listed = [
        f"{row['item']}, layer {row['layer']}, head {row['head']}: {number(row[show])} "
        f"(q = {number(row['q'])})"
        for row in hits.iter_rows(named=True)
    ]
    words = Words(
        title=style.title or f"{measure.capitalize()}: {of} against {minus}, head by head",
        overview="Coloured matrices of layers by heads, a panel for each of "
        f"{join(_names(frame))}: {value_title.lower()}. {tested}.",
        axes=["x: head, from 0", "y: layer, from 0 at the top"],
        legend=[
            f"colour: from {style.theme.diverging[0]} (negative) over "
            f"{style.theme.diverging[2]} (0) to {style.theme.diverging[-1]} (positive)",
            f"dot: q < {LEVEL}",
        ],
        value=show,
        quantity=SHOW[show].lower(),
        places={"item": "{}", "layer": "layer {}", "head": "head {}"},
        split=["item"],
        notes=listed,
        no_differences=f"{tested}. Heads with a dot are listed under Notes; the interval of every "
        "head is in the table.",
    )
    width = style.width or {1: 480, 2: 640}.get(frame["item"].n_unique(), 800)

    def chart() -> Any:
        return effect_heads(
            frame, show=show, value_title=value_title, theme=style.theme, width=width
        )

    return assemble(
        "effect-heads", chart, frame, words, caption=said, style=style, width=width + 40
    )


def _names(frame: pl.DataFrame) -> list[str]:
    return frame["item"].unique(maintain_order=True).to_list()


def _pair(
    run: Run, models: list[str], conditions: list[str], over: str | None
) -> tuple[Over, str, str]:
    """What is compared: over models, or over conditions; the first, and what is taken from it."""
    if over not in (None, "model", "condition"):
        raise unknown("comparison over", over, ("model", "condition"))
    base = [c for c in conditions if c in base_conditions(run)]
    variants = [c for c in conditions if c not in base]
    if over != "condition" and len(models) > 1:
        return "model", models[1], models[0]
    if over != "model" and base and variants:
        return "condition", variants[0], base[0]
    if over != "model" and len(variants) > 1:
        return "condition", variants[1], variants[0]
    raise InputError(
        f"a difference needs two models or two conditions; here are models {', '.join(models)} and "
        f"conditions {', '.join(conditions)}"
    )
