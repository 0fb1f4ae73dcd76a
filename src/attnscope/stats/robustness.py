"""How a claim survives the choices behind it: what its table under every choice (`sensitivity.py`)
comes to, for each place and in a line. Must not know how a claim is judged.
"""

from typing import Any

import polars as pl

CHOICES = ("queries", "keys", "classes", "normalise", "condition", "spikes")
"""What is varied, where the run has more than one."""


def robustness(table: pl.DataFrame) -> pl.DataFrame:
    """For each model, layer and head: over how many choices sign and verdict are the reference's,
    and which choices overturn the verdict: the fewest that do, in words. Without a reference
    nothing can survive it: null.
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
    """How a claim survives, over all models and layers that it was judged for: the reference's
    `verdict`, how many `choices` there are, how many of the `verdicts` are those of the reference
    (`same_verdict`), in how many of the `places` (a model, a layer) all are (`survives`), what
    overturns it where, and how many combinations of choices were `not_judged`.
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
    """What was left out of the combinations of choices, in words; empty where nothing was."""
    if not many:
        return ""
    combinations = "combination" if many == 1 else "combinations"
    return f"{many:,} further {combinations} that change most choices at once were not judged"


def _location(row: dict[str, Any]) -> str:
    parts = [row["model"], None if row["layer"] is None else f"layer {row['layer']}"]
    known = [part for part in parts if part is not None]
    return f"{', '.join(known)}: " if known else ""


def _fewest(overturning: list[dict[str, Any]]) -> list[str]:
    """Sets of choices that overturn, without those that contain a smaller one that does."""
    sets = [
        {f"{name} {row[name]}" for name in row["changed"].split(", ") if name}
        for row in overturning
    ]
    fewest = [one for one in sets if not any(other < one for other in sets)]
    return list(dict.fromkeys(" and ".join(sorted(one)) for one in fewest if one))
