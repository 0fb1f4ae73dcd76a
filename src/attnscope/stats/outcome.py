"""What the rows of one part of a claim come to, and that in words. Must not know where the rows
come from, or other parts.
"""

from typing import Any

import polars as pl
from scipy import stats

from attnscope.question.claims import ClaimPart
from attnscope.stats.intervals import MINIMUM


def outcome_of(part: ClaimPart, rows: pl.DataFrame) -> str:
    """Supported, contradicted or undetermined, by how many rows support and oppose."""
    needed = part.rule.share * rows.height
    supports, opposes = int(rows["supports"].sum()), int(rows["opposes"].sum())
    if part.rule.vote == "such":
        if _at_least(supports, rows.height) > part.rule.share:
            return "supported"
        return (
            "contradicted"
            if _at_least(opposes, rows.height) > 1 - part.rule.share
            else "undetermined"
        )
    if supports >= needed and supports > opposes:  # as many against as for decide nothing
        return "supported"
    if opposes > rows.height - needed:
        return "contradicted"
    return "undetermined"


def _at_least(some: int, of: int) -> float:
    """The share of such rows that these show with 95 % (Clopper and Pearson)."""
    return float(stats.beta.ppf(0.05, some, of - some + 1)) if some else 0.0


def said(part: ClaimPart, rows: pl.DataFrame, outcome: str) -> str:
    """The figures of a part in words."""
    comparison, bounds = part.comparison, part.rule.bounds
    wanted = part.direction if bounds is None else f"within {bounds[0]:g} to {bounds[1]:g}"
    if comparison.by:
        wanted = f"{wanted} by {comparison.by:g}"
    second = "" if comparison.over not in ("item", "layer") else f" of {_second(part)}"
    name = f"{part.quantity.measure}{second} against {rows['against'][0]}"
    units, n = _span(rows, "units"), _span(rows, "n")
    size = f"n {n}" if n == units else f"n {n} in {units} clusters"
    if spoilt := max(rows["not_positive"].to_list()):
        return (
            f"{name}: values of 0 or below in up to {spoilt} prompts of a row, and such a row "
            f"has no ratio: {outcome}"
        )
    if max(rows["units"].to_list()) < MINIMUM:
        return f"{name}: {size}, and fewer than {MINIMUM} units decide nothing"
    if rows.height > 1:
        supports, opposes = int(rows["supports"].sum()), int(rows["opposes"].sum())
        what = "layers" if rows["head"].null_count() else "heads"
        share = f"share needed {part.rule.share:g}"
        if part.rule.vote == "such":
            least = _at_least(supports, rows.height)
            share = f"so at least {least:.2f} of such {what}, needed {part.rule.share:g}"
            if _at_least(rows.height, rows.height) <= part.rule.share:
                share += f" (which {rows.height} {what} cannot show, whatever they do)"
        doubted = int(rows["doubtful"].sum())
        doubt = f", {doubted} of the intervals doubtful" if doubted else ""
        return (
            f"{name} ({wanted}): of these {rows.height} {what}, {supports} support and {opposes} "
            f"oppose, {share}, {size}{doubt}: {outcome}"
        )
    row = rows.row(0, named=True)
    if row["difference"] is None:
        return f"{name}: no values"
    if row["low"] is None:
        return f"{name}: all {n} values are the same, so there is no interval: {outcome}"
    tested = ""
    if bounds is None:
        least = row["p"] is not None and row["p"] <= row["floor"] * (1 + 1e-9)
        tested = f", q {'≤ ' if least else ''}{row['q']:.2g}"
    few = f", undefined in {row['left_out']} prompts" if row["left_out"] else ""
    doubt = ", interval doubtful" if row["doubtful"] else ""
    return (
        f"{name} ({wanted}): {row['mean_b']:.4g} against {row['mean_a']:.4g}, {row['scale']} "
        f"{row['difference']:.4g} [{row['low']:.4g}, {row['high']:.4g}]{tested}, "
        f"{size}{few}{doubt}: {outcome}"
    )


def _second(part: ClaimPart) -> str:
    """Of classes or layers that are compared: which is held against the first."""
    assert part.comparison.pair is not None
    second = str(part.comparison.pair[1])
    return f"layer {second}" if part.comparison.over == "layer" else second


def _span(rows: pl.DataFrame, name: str) -> str:
    """The smallest and the largest, where they differ."""
    least, most = min(rows[name].to_list()), max(rows[name].to_list())
    return str(least) if least == most else f"{least}–{most}"


def stated(statement: str, known: dict[str, Any]) -> str:
    """The statement with its names; what is not known stays general."""
    general = {"a": "one", "b": "the other", "condition": "a filler", "model": "the model"}
    words = {**general, "layer": "L", **{k: v for k, v in known.items() if v not in (None, "")}}
    try:
        return statement.format_map(words)
    except (KeyError, IndexError, ValueError):
        return statement
