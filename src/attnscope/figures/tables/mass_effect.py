"""For each head: its mass on a token class, and the effect of a knockout of that class."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from attnscope.figures.figure import Figure, Numbers
from attnscope.figures.numbers import rounded
from attnscope.figures.shapes.matrix import Matrix


def _numbers(table: pl.DataFrame, words: Mapping[str, Any]) -> Numbers:
    """From a table with `problem`, `class`, `layer`, `head`, `mass` (of the last prompt token on
    the class) and `effect` (of the knockout in that head)."""
    by = ["class", "layer", "head"]
    wide = table.group_by(by, maintain_order=True).agg(
        pl.col("mass", "effect").mean(), pl.col("problem").n_unique().alias("n")
    )
    long = wide.unpivot(["mass", "effect"], index=[*by, "n"], variable_name="quantity")
    panel = pl.format("{} of {}", "quantity", "class").alias("panel")
    n = max(wide["n"].to_list(), default=0)
    return Numbers(
        data=rounded(long.select(panel, *by, "quantity", "value", "n")),
        words=words,
        sentences=[f"Means over n = {n} problems; no intervals"],
        notes=[_together(part) for part in wide.partition_by("class", maintain_order=True)],
    )


def _together(part: pl.DataFrame) -> str:
    """Whether heads with more mass have larger effects."""
    ranks = part.select(pl.col("mass").rank(), pl.col("effect").abs().rank())
    rho = ranks.select(pl.corr("mass", "effect")).item()
    return f"{part['class'][0]}: Spearman's ρ of mass and |effect| over heads is {rho:.2f}."


FIGURE = Figure(
    name="mass-effect",
    shows="layers × heads: mass on a token class, and effect of a knockout of the class",
    by=["panel", "layer", "head"],
    shape=Matrix(y="mass or effect (nats)"),
    sentences=[
        "Mass: attention of the last prompt token to a token class",
        "Effect: change of the log-probability (nats) of the right answer when no query of that "
        "head can attend to the class; negative: the answer depends on it",
        "Layers and heads are counted from 0",
    ],
    from_table=_numbers,
    differences="Means, not compared with one another.",
    title="Mass and effect of a knockout, head by head: {of}",
    what="Each cell is one head: how much it attends to a token class, and what a knockout of the "
    "class in that head changes",
    quantity="value",
    needs="`attnscope evaluate --effect` draws it",
)
