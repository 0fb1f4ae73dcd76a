"""How a score depends on the settings of a condition, as differences from the baseline."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from attnscope.figures.figure import Figure, Numbers
from attnscope.figures.numbers import LEVEL, rounded
from attnscope.figures.shapes.dots import Dots
from attnscope.stats.paired import TESTED

COLUMNS = ("panel", "setting", "series", "value", "low", "high", "score", "n", "q")


def _numbers(table: pl.DataFrame, words: Mapping[str, Any]) -> Numbers:
    data = rounded(table.select(COLUMNS))
    names, none = data["panel"].unique(maintain_order=True).to_list(), data["low"].null_count()
    n, significant = max(data["n"].to_list(), default=0), int((data["q"] < LEVEL).sum())
    return Numbers(
        data=data,
        words={**words, "baseline": f"{words['baseline']:.3f}"},
        settings={"x_title": {name: name.rpartition(": ")[2] for name in names}},
        sentences=[
            f"n = {n} problems, paired by problem; bars: 95 % confidence intervals over problems",
            f"{none} differences have no interval: too few problems, or all values are equal"
            if none
            else "",
        ],
        text={
            "no_differences": f"{significant} of {data['q'].count()} tested differences have q < "
            f"{LEVEL} (p over problems: {TESTED}; Benjamini–Hochberg)."
        },
    )


FIGURE = Figure(
    name="sweep",
    shows="scores under a condition, over its settings, minus the score of the baseline",
    by=["panel", "setting", "series"],
    shape=Dots(x="setting", x_title="Setting", y="Score minus baseline", rule=0.0),
    sentences=[
        "Each panel varies one setting; the others have their defaults or the values in the legend"
    ],
    from_table=_numbers,
    title="Sensitivity: {of}",
    what="Each point is the score under a condition minus the score of the baseline ({baseline})",
    quantity="difference",
    needs="`attnscope evaluate` draws it if a condition has several settings",
    height=220,
)
