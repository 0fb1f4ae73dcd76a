"""Summarises how robust a verdict is under other choices, from the table of `sensitivity`."""

from typing import Any

import polars as pl

CHOICES = ("queries", "keys", "classes", "normalise", "condition", "spikes", "numbers")
"""The choices that are varied if there is more than one value; `numbers` are the margins,
thresholds and shares of the claim."""


def robustness(table: pl.DataFrame) -> pl.DataFrame:
    """For each model, layer and head: under how many choices sign and verdict equal the reference,
    and the smallest sets of choices that change the verdict. Null without a reference.
    """
    judged = table.filter(pl.col("difference").is_not_null())
    changed = pl.struct(*CHOICES, "changed").filter(~pl.col("same_verdict"))
    survived = judged.group_by("claim", "model", "layer", "head", maintain_order=True).agg(
        pl.len().alias("choices"),
        pl.col("verdict").filter(pl.col("reference")).first().alias("verdict"),
        pl.col("same_sign").sum().alias("same_sign"),
        pl.col("same_verdict").sum().alias("same_verdict"),
        pl.col("same_verdict").all(ignore_nulls=False).alias("survives"),
        changed.alias("overturned_by"),
    )
    words = [_fewest(rows) for rows in survived["overturned_by"].to_list()]
    return survived.with_columns(pl.Series("overturned_by", words, dtype=pl.List(pl.String())))


def robustness_summary(table: pl.DataFrame) -> dict[str, Any]:
    """One row for a claim, over all models and layers: the `verdict` of the reference, the number
    of `choices`, how many of the `verdicts` equal the reference (`same_verdict`), in how many
    `places` (model, layer) all do (`survives`), what overturns it (`overturned_by`), and how many
    combinations were `not_judged`.
    """
    verdicts = table.filter(pl.col("difference").is_not_null()).unique(
        ["claim", "model", "layer", *CHOICES], keep="first", maintain_order=True
    )
    places = robustness(verdicts.with_columns(pl.lit(None, dtype=pl.Int64()).alias("head")))
    overturned = [
        f"{_location(row)}{'; '.join(row['overturned_by'])}"
        for row in places.iter_rows(named=True)
        if row["overturned_by"]
    ]
    counted = places["verdict"].drop_nulls().value_counts(sort=True, name="n")
    counts: dict[str, int] = dict(counted.iter_rows())
    only = next(iter(counts), None)
    return {
        "claim": table["claim"][0],
        "verdict": ", ".join(f"{name} {n}" for name, n in counts.items())
        if len(counts) > 1
        else only,
        "choices": verdicts.select(*CHOICES).n_unique(),
        "verdicts": verdicts.height,
        "same_verdict": int(verdicts["same_verdict"].sum()),
        "places": places.height,
        "survives": int(places["survives"].sum()),
        "overturned_by": overturned,
        "not_judged": int(table["not_judged"][0]),
    }


def not_judged_note(many: int) -> str:
    """A note on the combinations that were left out; empty if none were."""
    if not many:
        return ""
    combinations = "combination" if many == 1 else "combinations"
    return f"{many:,} further {combinations} that change most choices at once were not judged"


def _location(row: dict[str, Any]) -> str:
    parts = [row["model"], None if row["layer"] is None else f"layer {row['layer']}"]
    known = [part for part in parts if part is not None]
    return f"{', '.join(known)}: " if known else ""


def _fewest(overturning: list[dict[str, Any]]) -> list[str]:
    """The smallest sets of choices that overturn the verdict."""
    sets = [
        {f"{name} {row[name]}" for name in row["changed"].split(", ") if name}
        for row in overturning
    ]
    fewest = [one for one in sets if not any(other < one for other in sets)]
    return list(dict.fromkeys(" and ".join(sorted(one)) for one in fewest if one))
