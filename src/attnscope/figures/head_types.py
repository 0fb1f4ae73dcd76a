"""Assigns types to heads: induction, retrieval, previous-token, class-specific, local, sink.

A head has a type if the confidence interval of its score lies above the threshold of the type. A
head may have several types; the most specific one comes first.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from attnscope.measures.measure import SHARE
from attnscope.stats.means import one_sample

LIFT = 3.0
"""A class counts for a head if its mass is at least this many times that of uniform attention."""


@dataclass(frozen=True)
class HeadType:
    """A head type, its score and its threshold."""

    name: str
    score: str
    threshold: float
    about: str


HEAD_TYPES = (
    HeadType("induction", "induction", 0.3, "A[i, i - n + 1] on repeated random tokens"),
    HeadType(
        "retrieval",
        "retrieval",
        0.1,
        "needle tokens generated while the largest weight was on them (published)",
    ),
    HeadType("previous-token", "previous", 0.3, "A[i, i - 1]"),
    HeadType(
        "class-specific", "class_mass", 0.2, f"mass of one class with a lift of {LIFT:g} or more"
    ),
    HeadType("local", "local", 0.5, "mass on the 8 tokens up to the query, the first aside"),
    HeadType("sink", "sink", 0.3, "mass on the first token (published)"),
)
"""The most specific first."""
NONE = "none of these"


def classify_heads(scores: pl.DataFrame) -> pl.DataFrame:
    """One row for each head: `layer`, `head`, `kind`, `kinds`, `class`, and of every score its mean
    over prompts, the ends of its interval (null where there is none) and n, from a table with the
    columns `score`, `item`, `prompt`, `layer`, `head`, `value`."""
    chosen = _classes(scores)
    places = ["layer", "head"]
    single = scores.filter(pl.col("item").is_null())
    of_class = scores.filter(pl.col("score") == "class_mass").join(
        chosen.rename({"class": "item"}), on=[*places, "item"], how="inner"
    )
    selected = pl.concat([single, of_class.select(single.columns)])
    table = scores.select(places).unique().sort(places).join(chosen, on=places, how="left")
    for head_type in HEAD_TYPES:
        of = _interval(selected.filter(pl.col("score") == head_type.score), head_type.score)
        table = table.join(of, on=places, how="left")
    matches = [
        pl.when(pl.col(f"{head_type.score}_low") > head_type.threshold).then(pl.lit(head_type.name))
        for head_type in HEAD_TYPES
    ]
    return table.with_columns(
        pl.coalesce(*matches, pl.lit(NONE)).alias("kind"),
        pl.concat_str(matches, separator=", ", ignore_nulls=True).alias("kinds"),
    ).select(*places, "kind", "kinds", pl.exclude(*places, "kind", "kinds"))


def _classes(scores: pl.DataFrame) -> pl.DataFrame:
    """For each head the class with the largest mass of those it prefers: `layer`, `head`, `class`.

    Chosen by the same prompts that its mass is then the mean of, so that mass is a little too high.
    """
    of = scores.filter(pl.col("score").is_in(["class_mass", "class_lift"])).pivot(
        on="score", index=["layer", "head", "item"], values="value", aggregate_function="mean"
    )
    if of.is_empty():
        return pl.DataFrame(schema={"layer": pl.Int64, "head": pl.Int64, "class": pl.String})
    return (
        of.filter(pl.col("class_lift") >= LIFT)
        .sort("class_mass", descending=True, nulls_last=True)
        .group_by("layer", "head", maintain_order=True)
        .first()
        .select("layer", "head", pl.col("item").alias("class"))
    )


def _interval(scores: pl.DataFrame, name: str) -> pl.DataFrame:
    """Mean, interval and n of every head."""
    columns = (name, f"{name}_low", f"{name}_high", f"{name}_n")
    types = (pl.Float64, pl.Float64, pl.Float64, pl.Int64)
    places = {"layer": pl.Int64, "head": pl.Int64}
    if scores.is_empty():
        return pl.DataFrame(schema={**places, **dict(zip(columns, types, strict=True))})
    wide = scores.pivot(on="prompt", index=["layer", "head"], values="value")
    x = wide.drop("layer", "head").cast(pl.Float64).to_numpy().T
    tested = one_sample(x, within=SHARE)
    low, high = tested.interval()
    values = dict(zip(columns, (tested.estimate, low, high, (~np.isnan(x)).sum(0)), strict=True))
    return wide.select("layer", "head").with_columns(
        pl.Series(name, value).fill_nan(None) if value.dtype.kind == "f" else pl.Series(name, value)
        for name, value in values.items()
    )


def summary(table: pl.DataFrame) -> pl.DataFrame:
    """One row for each kind: its threshold, how many heads have a mean above it, of how many the
    whole interval is, of how many heads (0 where the score is not known of any), and the heads with
    the largest scores."""
    rows = []
    for head_type in HEAD_TYPES:
        score = table[head_type.score]
        best = table.filter(score.is_not_null()).sort(head_type.score, descending=True).head(3)
        rows.append(
            {
                "kind": head_type.name,
                "threshold": head_type.threshold,
                "above": int((score > head_type.threshold).sum()),
                "certain": int((table[f"{head_type.score}_low"] > head_type.threshold).sum()),
                "heads": table.height if score.is_not_null().any() else 0,
                "prompts": int(table[f"{head_type.score}_n"].max() or 0),  # type: ignore[arg-type]
                "largest": ", ".join(
                    f"{layer}.{head} {value:.2f}"
                    for layer, head, value in best.select("layer", "head", head_type.score).rows()
                ),
                "what": head_type.about,
            }
        )
    return pl.DataFrame(rows)
