"""Histograms of activations under two conditions, with four statistics of each."""

from dataclasses import replace

import polars as pl

from attnscope.figures.figure import Figure
from attnscope.figures.numbers import means
from attnscope.figures.reading import ACTIVATIONS, MODEL_AND_LAYER, Rows, read
from attnscope.figures.select import AbsentError
from attnscope.figures.shapes.histogram import Histogram
from attnscope.figures.text_format import join, number

METRICS = {
    "near_zero": "near zero",
    "activation_l1": "L1",
    "activation_l2": "L2",
    "activation_gini": "Gini",
}
STEP = 0.05
"""Width of a bin."""
CORNER = (
    "Corner, for the conditions in the order of the legend: share of activations near zero (below "
    "ε of the base), mean L1 and L2 norm of a token's activations, Gini coefficient of absolute "
    "values"
)


def _with_statistics(rows: Rows) -> Rows:
    """The rows of a pair of conditions, and a line per statistic and panel."""
    selection, chosen = rows.selection, rows.request.choice.conditions
    pair = selection.conditions if chosen is not None else selection.conditions[:2]
    start = pl.col("item").cast(pl.Float64)
    values = rows.values.filter(pl.col("condition").is_in(pair)).with_columns(
        place=start, end=(start + STEP).round(2)
    )
    corner: dict[str, list[str]] = {}
    for measure, name in METRICS.items():
        try:
            read_rows = read(rows.request, FIGURE, [measure])
        except AbsentError:
            continue
        table = read_rows.values.with_columns(panel=MODEL_AND_LAYER)
        mean = means(table, ["panel", "condition"], rows.request.units)
        for (panel,), part in mean.group_by(["panel"], maintain_order=True):
            known = {c: number(float(f"{v:.4g}")) for c, v in part["condition", "value"].rows()}
            line = f"{name}: {' → '.join(known[c] for c in pair if c in known)}"
            corner.setdefault(str(panel), []).append(line)
    return replace(
        rows,
        values=values,
        measures=[*rows.measures, *METRICS],
        selection=replace(selection, conditions=list(pair)),
        settings={"corner": corner},
        words={"conditions": join(pair)},
        notes=[f"{panel}: {'; '.join(lines)}." for panel, lines in corner.items()],
    )


FIGURE = Figure(
    name="activations",
    shows="histograms of activations under two conditions, with four statistics: share near "
    "zero, L1, L2, Gini",
    measures=["activation_histogram"],
    base_only=False,
    layers=lambda layers: layers[:1],
    derived={"panel": MODEL_AND_LAYER, "series": "condition"},
    by=["panel", "series", "place", "end"],
    heads=ACTIVATIONS,
    sentences=[CORNER],
    shape=Histogram(x_title="Activation / 99th percentile of |activation| in the base"),
    change=_with_statistics,
    differences="Single bins are not tested; `attnscope compare` tests the four statistics.",
    title="Distribution of activations under two conditions",
    what="Each bar is the share of activations in a bin, mean over prompts, for {conditions}",
    quantity="share",
)
