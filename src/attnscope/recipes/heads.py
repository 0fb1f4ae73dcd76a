"""The recipes that score heads, joined: `sinks`, `induction` and `needle` on one model.

`attnscope heads` and the page run these experiments and classify heads by their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from attnscope.recipes.induction import induction
from attnscope.recipes.needle import found_needles, needle
from attnscope.recipes.recipe_models import label_of
from attnscope.recipes.sinks import sinks
from attnscope.spec.experiment import Experiment

if TYPE_CHECKING:
    from attnscope.run.store import Run

SCORES = {
    "sink": ("sinks", "first_token"),
    "previous": ("sinks", "previous_token"),
    "local": ("sinks", "nearby"),
    "induction": ("induction", "induction"),
    "retrieval": ("needle", "retrieval"),
}
"""Score → the recipe and the measure that give it."""


def head_experiments(
    model: str,
    *,
    prompts: int = 8,
    seed: int = 0,
    bos: bool = False,
    device: str | None = None,
    dtype: str = "auto",
    needles: bool = True,
) -> dict[str, Experiment]:
    """The experiments by recipe, with so many prompts each. `needles=False` leaves out the
    needles, which need the most time, and with them the retrieval score."""
    options: dict[str, Any] = {
        "models": {label_of(model): model},
        "prompts": prompts,
        "seed": seed,
        "device": device,
        "dtype": dtype,
    }
    # Plain text that ends with the first words of the needle: base models continue it too.
    hidden = {"source": "needle", "count": prompts, "seed": seed, "lengths": [120], "stem": True}
    experiments = {
        "sinks": sinks(
            **options,
            bos=bos,
            conditions={"text": {}},
            keys=["not-first"],
            measures=["first_token", "previous_token", "nearby", "mass"],
        ),
        "induction": induction(**options, bos=bos),
        "needle": needle(**options, bos=bos, chat=False).with_keys(prompts=hidden),
    }
    return {name: one for name, one in experiments.items() if needles or name != "needle"}


def head_scores(runs: Mapping[str, Run]) -> pl.DataFrame:
    """One row for each score, class, prompt, layer and head, from the runs of `head_experiments`:
    `score`, `item` (a class), `prompt`, `layer`, `head`, `value`.

    Scores are those of `SCORES`, and of every class `class_mass` and `class_lift`. The value is
    null where a prompt has none: the retrieval score of a needle that the model did not find.
    """
    parts = [
        _rows(runs[recipe], measure, score)
        for score, (recipe, measure) in SCORES.items()
        if recipe in runs
    ]
    lift = (pl.col("value") / pl.col("uniform")).fill_nan(None).alias("value")
    parts.append(_rows(runs["sinks"], "mass", "class_mass"))
    parts.append(_rows(runs["sinks"], "mass", "class_lift", lift))
    scores = pl.concat(parts)
    if "needle" not in runs:
        return scores
    (model,) = runs["needle"].experiment.models
    needles = found_needles(runs["needle"], model)
    missed = [prompt for prompt, is_found in needles.items() if not is_found]
    undefined = (pl.col("score") == "retrieval") & pl.col("prompt").is_in(missed)
    return scores.with_columns(pl.when(~undefined).then("value"))


def _rows(run: Run, measure: str, score: str, value: Any = "value") -> pl.DataFrame:
    rows = run.values.filter(pl.col("measure") == measure, pl.col("value").is_not_null())
    head = pl.col("layer", "head").cast(pl.Int64)
    return rows.select(pl.lit(score).alias("score"), "item", "prompt", head, value).collect()
