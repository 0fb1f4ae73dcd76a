"""The type of each head, layers by heads, one colour per type."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from attnscope.figures.figure import Figure, Numbers
from attnscope.figures.head_types import HEAD_TYPES, NONE
from attnscope.figures.numbers import rounded
from attnscope.figures.shapes.matrix import Matrix

COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#e377c2", "#ff7f0e", "#9aa0a6", "#eef0f3")
TYPES = dict(zip([*(one.name for one in HEAD_TYPES), NONE], COLOURS, strict=True))
RULES = "; ".join(f"{one.name} > {one.threshold:g}" for one in HEAD_TYPES)


def _numbers(table: pl.DataFrame, words: Mapping[str, Any]) -> Numbers:
    """From the table of `classify_heads`."""
    many = dict(table["kind"].value_counts().iter_rows())
    counts = ", ".join(f"{name}: {many[name]}" for name in TYPES if name in many)
    interval = (
        "A head has a type if the 95 % confidence interval of its score over "
        f"n = {words['prompts']} prompts lies above the threshold"
    )
    notes = [f"Heads of each type: {counts}."]
    return Numbers(data=rounded(table), words=words, sentences=[interval], notes=notes)


FIGURE = Figure(
    name="heads",
    shows="layers × heads: the type of each head",
    by=["layer", "head"],
    shape=Matrix(value="kind", y="type", colour_of=TYPES),
    sentences=[
        f"Of several types, the first in this order is drawn: {RULES}",
        "Layers and heads are counted from 0",
    ],
    from_table=_numbers,
    differences="The figure shows types; differences are not tested.",
    title="Head types of {model}",
    what="Each cell is one head, coloured by its type",
    quantity="type",
    needs="`attnscope heads` draws it",
)
