"""Flow between classes: how the attention of one class of queries falls on classes of keys.

Drawn from `flow`. This module must not know how it is measured.
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
from attnscope.figures.matrix import matrices
from attnscope.figures.numbers import differences, means, rank, shown
from attnscope.figures.style import Style
from attnscope.figures.theme import PUBLISHED, Theme
from attnscope.figures.words import join
from attnscope.stats.tables import combine as combine_heads

__all__ = ["NEEDS", "draw", "flow"]

NEEDS = "an experiment with `flow` among its measures has it"
WRITTEN = 8
"""The most classes whose numbers are written into the cells."""


def flow(frame: pl.DataFrame, *, theme: Theme = PUBLISHED, width: float = 780) -> Any:
    """The chart of `frame`: per `model` and `layer` a matrix of `from` by `to`, coloured."""
    named = frame.with_columns(pl.format("{}, layer {}", "model", "layer").alias("panel"))
    order = frame["from"].unique(maintain_order=True).to_list()
    targets = frame["to"].unique(maintain_order=True).to_list()
    top = frame["value"].max()
    assert isinstance(top, float)
    steps = [top * i / (len(theme.sequential) - 1) for i in range(len(theme.sequential))]
    few = max(len(order), len(targets)) <= WRITTEN
    return matrices(
        named,
        x="to",
        y="from",
        panel="panel",
        x_order=targets,
        y_order=order,
        x_title="to (keys)",
        y_title="from (queries)",
        value="value",
        value_title="Mass",
        domain=steps,
        colours=theme.sequential,
        theme=theme,
        width=width,
        texts=few,
        most=2,
    )


def draw(run: Run, choice: Choice, style: Style, *, combine: str | None = None) -> Figure:
    """The figure of a run: its first and last layer, unless others are asked for."""
    heads = heads_way(run, combine)
    found = rows(run, choice, ["flow"], NEEDS, base_only=True, fold=True)
    every = found.layers
    layers = every if choice.layers is not None else sorted({every[0], every[-1]})
    kept = found.frame.filter(pl.col("layer").is_in(layers))
    values = combine_heads(kept, heads)
    # A class that gets exactly nothing, from whomever, has no keys here: a column of zeros.
    most = dict(values.group_by("target").agg(pl.col("value").abs().max()).iter_rows())
    empty = [name for name in most if most[name] == 0] if choice.items is None else []
    if len(empty) < len(most):
        values = values.filter(~pl.col("target").is_in(empty))
    frame = means(values, ["model", "layer", "item", "target"])
    targets = [c for c in found.items if c in set(frame["target"])]
    targets += sorted(set(frame["target"]) - set(targets))
    order = [
        rank("layer", layers),
        rank("model", found.models),
        rank("item", found.items),
        rank("target", targets),
    ]
    frame = shown(frame).sort(order).rename({"item": "from", "target": "to"})
    pairs = [(b, a) for a, b in combinations(found.models, 2)]
    paired = None
    if pairs:
        paired = differences(values, "model", pairs, ["layer", "item", "target"])
        paired = paired.sort(order[0], *order[2:], maintain_order=True)
        paired = paired.rename({"item": "from", "target": "to"})
    said = caption(
        run,
        [
            f"{join(found.sources)}, {layers_said(layers)}"
            + (f", of {len(every)} in the run" if len(layers) < len(every) else "")
            + f", {heads_said(run, heads, found.frame, found.sources)}",
            "Flow: mean over the queries of a class (row) of their mass on a class of keys "
            f"(column); queries: {found.queries}; keys: {found.keys}; class set: {found.classes}; "
            f"condition: {', '.join(found.conditions)}; not normalised further",
            prompts_said(frame["n"].to_list(), interval=False),
            f"No column: {join(_in_order(found.items, empty))}, to which exactly nothing goes"
            if empty
            else "",
            f"{found.not_numbers} undefined values (a class without queries) are left out"
            if found.not_numbers
            else "",
        ],
        found.sources,
    )
    words = Words(
        title=style.title or "Flow of attention between classes of tokens",
        overview="Coloured matrices, a panel per model and layer: rows are the classes of the "
        "queries, columns those of the keys.",
        axes=["x: class of the key", "y: class of the query"],
        legend=[
            f"colour: from {style.theme.sequential[0]} (0) to {style.theme.sequential[-1]} (most)"
        ],
        value="value",
        quantity="flow",
        places={"layer": "layer {}", "model": "{}", "from": "from {}", "to": "to {}"},
        order="to",
        split=["layer", "model"],
        no_differences="One model only: there is nothing to compare with.",
    )
    width = style.width or (420 if len(layers) * len(found.models) == 1 else 780)
    return assemble(
        "flow",
        lambda: flow(frame, theme=style.theme, width=width),
        frame,
        words,
        caption=said,
        style=style,
        width=width + 60,
        differences=paired,
    )


def _in_order(classes: list[str], some: list[str]) -> list[str]:
    return [name for name in classes if name in some] + sorted(set(some) - set(classes))
