"""Decides one part of a claim from its rows, and writes the numbers that decide in one line."""

from typing import Any

import polars as pl
from scipy import stats

from attnscope.spec.claims import IN_BRACES, Claim, ClaimPart
from attnscope.stats.evidence import ONE_IN, null_of
from attnscope.stats.intervals import MINIMUM


def outcome_of(part: ClaimPart, rows: pl.DataFrame) -> str:
    """Supported, contradicted or undetermined, from the number of rows that support and oppose."""
    needed = part.rule.share * rows.height
    supports, opposes = int(rows["supports"].sum()), int(rows["opposes"].sum())
    if part.rule.share_of == "population":
        if share_bound(supports, rows.height) > part.rule.share:
            return "supported"
        return (
            "contradicted"
            if share_bound(opposes, rows.height) > 1 - part.rule.share
            else "undetermined"
        )
    if supports >= needed and supports > opposes:  # a tie decides nothing
        return "supported"
    if opposes > rows.height - needed:
        return "contradicted"
    return "undetermined"


def share_bound(some: int, of: int) -> float:
    """The lower 95 % Clopper-Pearson bound of the share `some / of`."""
    return float(stats.beta.ppf(0.05, some, of - some + 1)) if some else 0.0


def part_names(claim: Claim) -> list[str]:
    """A name for each part: its measure and what is compared. If two parts would have the same
    name, the settings in which they differ are added."""
    names = [_name(part) for part in claim.parts]
    settings = [_settings(part) for part in claim.parts]
    unique = []
    for name, setting in zip(names, settings, strict=True):
        same_name = [other for n, other in zip(names, settings, strict=True) if n == name]
        differing = [
            f"{key} {value}"
            for key, value in setting.items()
            if value and any(other[key] != value for other in same_name)
        ]
        unique.append(f"{name} ({', '.join(differing)})" if differing else name)
    return unique


def _name(part: ClaimPart) -> str:
    pair, over = part.comparison.pair, part.comparison.over
    if over in ("item", "queries", "keys") and pair:
        return f"{part.quantity.measure} of {pair[1]}"
    if over == "layer" and pair:
        return f"{part.quantity.measure} of layer {pair[1]}"
    return part.quantity.measure


def _settings(part: ClaimPart) -> dict[str, str]:
    """The settings of a part as text; empty if it leaves one to the run."""
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
    """The names of the first (`a`) and the second (`b`) that a claim compares: classes, queries,
    keys, layers or measures. Models and conditions are left out: they depend on the run."""
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


def part_summary(part: ClaimPart, rows: pl.DataFrame, name: str | None = None) -> str:
    """The numbers of a part in one line: the result, what was required, and n.

    `name` is the name of the part; default: its measure.
    """
    name = name or _name(part)
    size = _sample_size(rows)
    if not_positive := max(rows["not_positive"].to_list()):
        return (
            f"{name}: no ratio, because up to {not_positive} prompts of a row have a value of 0 "
            f"or below, {size}"
        )
    if max(rows["units"].to_list()) < MINIMUM:
        return f"{name}: too few prompts, required at least {MINIMUM} units, {size}"
    if rows.height > 1:
        return f"{name}: {_share_of_rows(part, rows)}, {size}{_row_notes(rows)}"
    row = rows.row(0, named=True)
    if row["difference"] is None:
        return f"{name}: no values, {size}"
    if row["low"] is None:
        return f"{name}: all values are the same, so there is no confidence interval, {size}"
    return f"{name}: {_one_row(part, row)}, {size}{_notes(row)}"


def _one_row(part: ClaimPart, row: dict[str, Any]) -> str:
    """The estimate with its confidence interval, what was required, and q."""
    ends = [row["difference"], row["low"], row["high"]]
    if _is_value(part):
        ends = [end + float(part.comparison.threshold or 0.0) for end in ends]
    estimate, low, high = ends
    tested = ""
    if part.rule.bounds is None:
        smallest = row["p"] is not None and row["p"] <= row["min_p"] * (1 + 1e-9)
        tested = f", q {'≤' if smallest else '='} {row['q']:.2g}"
    quantity = "" if _is_value(part) else f"{_quantity(part, row['against'])} "
    return f"{quantity}{estimate:.4g} [{low:.4g}, {high:.4g}], required {_limit(part)}{tested}"


def _share_of_rows(part: ClaimPart, rows: pl.DataFrame) -> str:
    """How many layers or heads support and oppose, and the share that was required."""
    supports, opposes = int(rows["supports"].sum()), int(rows["opposes"].sum())
    what = "layers" if rows["head"].null_count() else "heads"
    needed = f"{100 * part.rule.share:.3g} %"
    share = f"share {100 * supports / rows.height:.3g} %, required at least {needed}"
    if part.rule.share_of == "population":
        bound = share_bound(supports, rows.height)
        share = f"95 % lower bound of the share {100 * bound:.3g} %, required more than {needed}"
        if share_bound(rows.height, rows.height) <= part.rule.share:
            share += f" (not possible with {rows.height} {what})"
    return (
        f"{supports} of {rows.height} {what} support "
        f"({_quantity(part, rows['against'][0])} {_limit(part)}), {opposes} oppose, {share}"
    )


def _is_value(part: ClaimPart) -> bool:
    """Whether the value itself is compared with a threshold."""
    return part.comparison.over is None and part.comparison.scale == "difference"


def _quantity(part: ClaimPart, against: str) -> str:
    """What has to exceed the limit: the value, or its difference or ratio to another."""
    if _is_value(part):
        return "value"
    ratio = part.comparison.scale == "ratio"
    return f"ratio to {against}" if ratio else f"difference from {against}"


def _limit(part: ClaimPart) -> str:
    """What a row must exceed to support the claim."""
    base = float(part.comparison.threshold or 0.0) if _is_value(part) else 0.0
    if part.rule.bounds is not None:
        low, high = (base + bound for bound in part.rule.bounds)
        return f"within {low:g} to {high:g}"
    return f"{'<' if part.direction == 'less' else '>'} {base + null_of(part):.4g}"


def _sample_size(rows: pl.DataFrame) -> str:
    units, n = _span(rows, "units"), _span(rows, "n")
    return f"n = {n} prompts" if n == units else f"n = {n} prompts in {units} clusters"


def _notes(row: dict[str, Any]) -> str:
    """What limits the result of a single row; empty if nothing does."""
    notes = ""
    if row["left_out"]:
        notes = f", no value in {row['left_out']} of {row['left_out'] + row['n']} prompts"
    if row["disqualified"]:
        notes += f" (more than 1 in {ONE_IN}, so the row does not count)"
    return notes + (", unreliable interval" if row["unreliable"] else "")


def _row_notes(rows: pl.DataFrame) -> str:
    """How many intervals are unreliable, and how many rows do not count because too many prompts
    have no value; empty if none."""
    unreliable = int(rows["unreliable"].sum())
    note = f", {unreliable} of {rows.height} intervals unreliable" if unreliable else ""
    some = rows.filter("disqualified")
    if some.is_empty():
        return note
    what = "layers" if rows["head"].null_count() else "heads"
    undefined, n = _span(some, "left_out"), max((some["n"] + some["left_out"]).to_list())
    return (
        f"{note}, {some.height} of {rows.height} {what} do not count, because more than 1 "
        f"in {ONE_IN} prompts have no value there ({undefined} of {n})"
    )


def _span(rows: pl.DataFrame, name: str) -> str:
    """The minimum and the maximum of a column; one number if they are equal."""
    low, high = min(rows[name].to_list()), max(rows[name].to_list())
    return str(low) if low == high else f"{low}–{high}"


def fill_statement(statement: str, known: dict[str, Any]) -> str:
    """The statement with its placeholders filled in; an unknown one gets a general word."""
    general = {"a": "one", "b": "the other", "condition": "a filler", "model": "the model"}
    words = {**general, "layer": "L", **{k: v for k, v in known.items() if v not in (None, "")}}
    return IN_BRACES.sub(lambda match: str(words.get(match[1], match[0])), statement)
