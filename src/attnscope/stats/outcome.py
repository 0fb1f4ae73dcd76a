"""What the rows of one part of a claim come to, and that in words. Must not know where the rows
come from, or other parts.
"""

from typing import Any

import polars as pl
from scipy import stats

from attnscope.spec.claims import IN_BRACES, Claim, ClaimPart
from attnscope.stats.evidence import ONE_IN
from attnscope.stats.intervals import MINIMUM


def outcome_of(part: ClaimPart, rows: pl.DataFrame) -> str:
    """Supported, contradicted or undetermined, by how many rows support and oppose."""
    needed = part.rule.share * rows.height
    supports, opposes = int(rows["supports"].sum()), int(rows["opposes"].sum())
    if part.rule.share_of == "population":
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


def part_names(claim: Claim) -> list[str]:
    """A name for each part: its measure and what is compared; where two parts would have the same
    name, also whatever else differs between the parts."""
    names = [_name(part) for part in claim.parts]
    known = [_choices(part) for part in claim.parts]
    made = []
    for name, choices in zip(names, known, strict=True):
        alike = [other for n, other in zip(names, known, strict=True) if n == name]
        differing = [
            f"{key} {choice}"
            for key, choice in choices.items()
            if choice and any(other[key] != choice for other in alike)
        ]
        made.append(f"{name} ({', '.join(differing)})" if differing else name)
    return made


def _name(part: ClaimPart) -> str:
    pair, over = part.comparison.pair, part.comparison.over
    if over in ("item", "queries", "keys") and pair:
        return f"{part.quantity.measure} of {pair[1]}"
    if over == "layer" and pair:
        return f"{part.quantity.measure} of layer {pair[1]}"
    return part.quantity.measure


def _choices(part: ClaimPart) -> dict[str, str]:
    """What a part chooses, in words; empty where it chooses nothing."""
    quantity, layers = part.quantity, part.scope.layers
    return {
        "item": "+".join(quantity.item or ()),
        "target": quantity.target or "",
        "queries": quantity.queries or "",
        "keys": quantity.keys or "",
        "classes": quantity.classes or "",
        "normalise": quantity.normalise,
        "layers": layers if isinstance(layers, str) else ", ".join(map(str, layers)),
        "heads": part.scope.heads,
        "second": str(pair[1]) if (pair := part.comparison.pair) else "",
    }


def sides_of(claim: Claim) -> dict[str, str]:
    """The two that a claim compares by name, wherever it is judged: classes, queries, keys, layers
    or measures; of several parts all of them. Models and conditions depend on the run."""
    pairs = [
        (part.comparison.over, part.comparison.pair)
        for part in claim.parts
        if part.comparison.over not in (None, "model", "condition") and part.comparison.pair
    ]
    return {
        side: ", ".join(
            dict.fromkeys(f"layer {p[i]}" if over == "layer" else str(p[i]) for over, p in pairs)
        )
        for i, side in enumerate("ab")
    }


def said(part: ClaimPart, rows: pl.DataFrame, outcome: str, named: str | None = None) -> str:
    """The figures of a part in words; it is called `named`, by default by its measure."""
    comparison, bounds = part.comparison, part.rule.bounds
    wanted = part.direction if bounds is None else f"within {bounds[0]:g} to {bounds[1]:g}"
    if comparison.by:
        wanted = f"{wanted} by {comparison.by:g}"
    name = f"{named or _name(part)} against {rows['against'][0]}"
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
        if part.rule.share_of == "population":
            least = _at_least(supports, rows.height)
            share = f"so at least {least:.2f} of such {what}, needed {part.rule.share:g}"
            if _at_least(rows.height, rows.height) <= part.rule.share:
                share += f" (which {rows.height} {what} cannot show, whatever they do)"
        doubted = int(rows["unreliable"].sum())
        doubt = f", {doubted} of the intervals unreliable" if doubted else ""
        return (
            f"{name} ({wanted}): of these {rows.height} {what}, {supports} support and {opposes} "
            f"oppose, {share}, {size}{doubt}{_without_vote(rows, what)}: {outcome}"
        )
    row = rows.row(0, named=True)
    if row["difference"] is None:
        return f"{name}: no values"
    if row["low"] is None:
        return f"{name}: all {n} values are the same, so there is no interval: {outcome}"
    tested = ""
    if bounds is None:
        least = row["p"] is not None and row["p"] <= row["min_p"] * (1 + 1e-9)
        tested = f", q {'≤ ' if least else ''}{row['q']:.2g}"
    few = ""
    if row["left_out"]:
        few = f", undefined in {row['left_out']} of {row['left_out'] + row['n']} prompts"
    if row["disqualified"]:
        few += f" (more than one in {ONE_IN}), so it decides nothing"
    doubt = ", interval unreliable" if row["unreliable"] else ""
    return (
        f"{name} ({wanted}): {row['mean_b']:.4g} against {row['mean_a']:.4g}, {row['scale']} "
        f"{row['difference']:.4g} [{row['low']:.4g}, {row['high']:.4g}]{tested}, "
        f"{size}{few}{doubt}: {outcome}"
    )


def _without_vote(rows: pl.DataFrame, what: str) -> str:
    """How many rows decide nothing because too many prompts have no value, if any do."""
    some = rows.filter("disqualified")
    if some.is_empty():
        return ""
    undefined, n = _span(some, "left_out"), max((some["n"] + some["left_out"]).to_list())
    return (
        f"; {some.height} of {rows.height} {what} decide nothing, because more than one in "
        f"{ONE_IN} prompts have no value there ({undefined} of {n})"
    )


def _span(rows: pl.DataFrame, name: str) -> str:
    """The smallest and the largest, where they differ."""
    least, most = min(rows[name].to_list()), max(rows[name].to_list())
    return str(least) if least == most else f"{least}–{most}"


def stated(statement: str, known: dict[str, Any]) -> str:
    """The statement with its names; what is not known stays general."""
    general = {"a": "one", "b": "the other", "condition": "a filler", "model": "the model"}
    words = {**general, "layer": "L", **{k: v for k, v in known.items() if v not in (None, "")}}
    return IN_BRACES.sub(lambda found: str(words.get(found[1], found[0])), statement)
