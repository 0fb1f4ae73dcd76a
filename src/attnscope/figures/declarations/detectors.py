"""How well the sum of a measure over a layer's heads separates right from wrong answers."""

from typing import Any

import numpy as np
import polars as pl

from attnscope.figures.figure import Figure, Numbers, Request
from attnscope.figures.numbers import in_order, rounded
from attnscope.figures.reading import SHOWS_VALUES, read
from attnscope.figures.select import AbsentError
from attnscope.figures.shapes.lines import Lines
from attnscope.recipes.detectors import auroc, right_answers

SERIES = {
    "log_self_mass": "log self-attention",
    "laplacian": "Laplacian eigenvalues",
    "lookback_per_token": "lookback ratio",
}
RESAMPLES = 1000
FEWEST = 6
"""Prompts for an interval."""


def _area(scores: pl.DataFrame, right: dict[int, bool], drawn: bool) -> dict[str, Any]:
    """AUROC, its 95 % percentile interval over prompts if drawn, and the number of prompts."""
    labels = [right[prompt] for prompt in scores["prompt"]]
    table = np.stack([scores["value"].to_numpy(), labels, np.zeros(len(labels))], axis=1)
    area_row: dict[str, Any] = {"value": auroc(table), "low": None, "high": None, "n": len(table)}
    if drawn and len(table) >= FEWEST:
        picks = np.random.default_rng(0).integers(0, len(table), (RESAMPLES, len(table)))
        areas = [area for pick in picks if (area := auroc(table[pick])) == area]
        if areas:
            area_row |= dict(zip(("low", "high"), np.quantile(areas, [0.025, 0.975]), strict=True))
    return area_row


def _numbers(request: Request, figure: Figure) -> Numbers:
    rows = read(request, figure)
    models = rows.selection.models
    right = {model: right_answers(request.run, model) for model in models}
    if not all(right.values()):
        raise AbsentError("this run has no answers that can be right or wrong", missing=["answer"])
    series = pl.col("measure").replace_strict(SERIES, default=None).alias("series")
    by = ["model", "series", "layer"]
    values = rows.values.with_columns(series).drop_nulls("value")
    values = values.group_by(*by, "prompt", maintain_order=True).agg(pl.col("value").mean())
    alone = request.units.column is None and request.units.strata is None  # prompts are the units
    table = [
        {"panel": model, "series": name, "layer": layer} | _area(scores, right[model], alone)
        for (model, name, layer), scores in values.group_by(by, maintain_order=True)
    ]
    data = pl.DataFrame(table, schema_overrides={"low": pl.Float64, "high": pl.Float64})
    order: dict[str, Any] = {
        "panel": models,
        "series": list(SERIES.values()),
        "layer": rows.selection.layers,
    }
    shares = [f"{sum(of.values())} of {len(of)} by {model}" for model, of in right.items()]
    return Numbers(
        data=rounded(figure.shape.arrange(in_order(data, **order))),
        selection=rows.selection,
        measures=rows.measures,
        sentences=[f"Right answers: {', '.join(shares)}"],
    )


FIGURE = Figure(
    name="detectors",
    shows="AUROC of right against wrong answers by layer, for measures that detect wrong answers",
    measures=list(SERIES),
    by=["panel", "series", "layer"],
    shape=Lines(y="AUROC", zero=False, rule=0.5, rule_means="chance"),
    numbers=_numbers,
    sentences=["Above 0.5, right answers have larger values; nothing is fitted"],
    differences=SHOWS_VALUES,
    title="Right and wrong answers, by layer",
    what="Lines are the probability that a right answer has a larger mean over heads than a wrong "
    "one",
    quantity="AUROC",
    undefined=" (eigenvalues of answers with fewer than ten tokens)",
    intervals="2.5 % to 97.5 % of resampled prompts",
    needs="a run of the recipe detectors has the numbers",
)
