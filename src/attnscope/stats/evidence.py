"""Collects the evidence for one part of a claim: its rows, compared prompt by prompt, and whether
each row supports or opposes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from attnscope.measures.registry import COLUMNS
from attnscope.spec.claims import Claim, ClaimPart
from attnscope.stats import tables
from attnscope.stats.contrast import ContrastSettings, paired_contrast
from attnscope.stats.intervals import MINIMUM
from attnscope.stats.resampling import ResamplingUnits
from attnscope.stats.tables import Matrix, matrix, ranges

ONE_IN = 10
"""A row does not count if more than one in so many of its prompts have no value."""


class NotMeasuredError(Exception):
    """The run lacks a measurement; the message names what to measure."""


class NotPairedError(Exception):
    """Some prompts were measured on one side only."""


@dataclass(frozen=True, slots=True)
class RunContents:
    """What a run contains, and its resampling units."""

    models: list[str]
    conditions: list[str]
    insertions: dict[str, str | None]
    """The kind of insertion of each condition; None for the base. Empty if unknown."""
    measures: list[str]
    first: dict[str, list[str]]
    """Queries, keys and classes, in the order in which the experiment lists them."""
    settings: ContrastSettings
    sources: ResamplingUnits

    def matching(self, selector: str) -> list[str]:
        """The conditions that a selector matches; none is an error."""
        known = {name: self.insertions.get(name) for name in self.conditions}
        if selector in known:
            return [selector]
        if selector in ("base", "variant") and self.insertions:
            matches = [n for n, kind in known.items() if (kind is None) == (selector == "base")]
        elif selector == "base" and len(known) == 1:
            matches = list(known)
        else:
            kind = selector.removeprefix("kind:")
            matches = [n for n, k in known.items() if selector.startswith("kind:") and k == kind]
        if matches:
            return matches
        what = {"base": "without an insertion", "variant": "with an insertion"}.get(selector)
        if selector.startswith("kind:"):
            what = f"with insert: {{kind: {selector.removeprefix('kind:')}}}"
        raise NotMeasuredError(
            f"no condition {selector!r} in this run (it has {', '.join(known)}); "
            f"add one {what or 'of that name'} to the experiment's conditions"
        )


def measures(part: ClaimPart) -> list[str]:
    """The measures that a part needs."""
    if part.comparison.over == "measure" and part.comparison.pair:
        return [str(side) for side in part.comparison.pair]
    return [part.quantity.measure]


def missing(measure: str) -> NotMeasuredError:
    """The error for a measure that a run does not have; names what to add."""
    declared = COLUMNS.get(measure)
    name = measure if declared is None else declared.name
    pair = declared is not None and declared.compares_to_base
    also = ", with a condition that has an insertion" if pair else ""
    return NotMeasuredError(
        f"{measure!r} was not measured; add {name!r} to the experiment's measures{also}"
    )


def default_condition(claim: Claim, contents: RunContents) -> str:
    """The selector of a claim's condition; default: the condition that has values."""
    if claim.condition is not None:
        return claim.condition
    needed = {m for part in claim.parts for m in measures(part)}
    of_pairs = all(m in COLUMNS and COLUMNS[m].compares_to_base for m in needed)
    return "variant" if of_pairs and contents.insertions else "base"


def evidence(
    claim: Claim,
    number: int,
    table: pl.DataFrame,
    contents: RunContents,
    models: tuple[str, str] | str,
    binding: dict[str, str],
) -> pl.DataFrame:
    """Statistics of one part, a row per layer and head; `table` has the rows of its measures."""
    part = claim.parts[number]
    over, quantity = part.comparison.over, part.quantity
    table = table.filter(pl.col("model").is_in([models] if isinstance(models, str) else models))
    conditions = (
        [binding[str(side)] for side in part.comparison.pair or ()]
        if over == "condition"
        else [binding[default_condition(claim, contents)]]
    )
    table = table.filter(pl.col("condition").is_in(conditions))
    if table.is_empty():
        raise NotMeasuredError(
            f"{quantity.measure!r} was not measured in condition {', '.join(conditions)}"
        )
    chosen: dict[str, str | None] = {}
    for what in ("queries", "keys", "classes"):
        if over == what:
            for side in part.comparison.pair or ():
                _choose(table, what, str(side), [])
            table = table.filter(pl.col(what).is_in(part.comparison.pair or ()))
            chosen[what] = str((part.comparison.pair or ("", ""))[1])
            continue
        table, chosen[what] = _choose(table, what, getattr(quantity, what), contents.first[what])
    table = _in_scope(table, part)
    table = _amounts(table, part)
    a, b = _sides(table, part, models, conditions)
    rows = _contrasted(a, b, part, contents).with_columns(*_decided(part))
    labels = {
        "part": number,
        "measure": quantity.measure,
        "against": _against(part, models, conditions),
        "scale": part.comparison.scale,
        "normalise": quantity.normalise if quantity.measure == "mass" else None,
        "item": None if quantity.item is None else "+".join(quantity.item),
        "spikes": item_of(part),
        "combine": part.scope.heads,
        **chosen,
    }
    return rows.select(
        *(pl.lit(value, dtype=_type(value)).alias(name) for name, value in labels.items()),
        pl.all(),
    ).sort(["layer", "head"])


def item_of(part: ClaimPart) -> str | None:
    """The item of a measure that has one value per item (spikes); else None."""
    declared = [COLUMNS[m] for m in measures(part) if m in COLUMNS and COLUMNS[m].items]
    if not declared:
        return None
    item = part.quantity.item
    return declared[0].default if item is None else item[0]


def null_of(part: ClaimPart) -> float:
    """The difference, or ratio, that has to be exceeded."""
    sign = -1.0 if part.direction == "less" else 1.0
    if part.comparison.scale == "ratio":
        return float((1 + part.comparison.by) ** sign)
    return sign * part.comparison.by


def _contrasted(a: Matrix, b: Matrix, part: ClaimPart, contents: RunContents) -> pl.DataFrame:
    """Statistics of the second against the first, tested against what has to be exceeded."""
    ratio = part.comparison.scale == "ratio"
    not_positive = np.zeros(b.columns.height, dtype=int)
    first, second = a.x, b.x
    if ratio:
        wrong = (first <= 0) | (second <= 0)
        not_positive = wrong.sum(0)
        # Leaving out single prompts would select prompts by their values.
        spoilt = wrong.any(0)
        first, second = (np.log(np.where(spoilt | ~(x > 0), np.nan, x)) for x in (first, second))
    shift = np.log(null_of(part)) if ratio else null_of(part)
    figures = paired_contrast(
        first + shift,
        second,
        np.zeros(b.columns.height, dtype=np.intp),  # all rows of a part are one family
        replace(contents.settings, level=1 - part.rule.level),
        contents.sources.labels(b.prompts),
    )
    figures["mean_a"] = figures["mean_a"] - shift
    for name in ("difference", "low", "high"):
        figures[name] = figures[name] + shift
    rows = b.columns.with_columns(
        *(pl.Series(name, np.asarray(figure)) for name, figure in figures.items()),
        pl.Series("not_positive", not_positive),
    ).with_columns(pl.selectors.float().fill_nan(None))
    if ratio:
        rows = rows.with_columns(pl.col("mean_a", "mean_b", "difference", "low", "high").exp())
        rows = rows.with_columns(pl.col("difference").alias("ratio"))
    return rows


def _type(value: object) -> Any:
    return pl.Int64() if isinstance(value, int) else pl.String()


def _choose(
    table: pl.DataFrame, what: str, name: str | None, listed: list[str]
) -> tuple[pl.DataFrame, str | None]:
    """Keep one of the queries, keys or class sets: `name`, or by default the run's first."""
    measured = table[what].drop_nulls().unique(maintain_order=True).to_list()
    if not measured:
        return table, None
    if name is not None and name not in measured:
        raise NotMeasuredError(
            f"{what} {name!r} were not measured here (but {', '.join(measured)}); "
            f"add {name!r} to the experiment's {what}"
        )
    chosen = name or next((name for name in listed if name in measured), measured[0])
    return table.filter(pl.col(what) == chosen), chosen


def _in_scope(table: pl.DataFrame, part: ClaimPart) -> pl.DataFrame:
    measured = table["layer"].unique().to_list()
    layers = part.comparison.pair if part.comparison.over == "layer" else part.scope.layers
    if isinstance(layers, str) or layers is None:
        return table
    for layer in layers:
        if layer not in measured:
            raise NotMeasuredError(
                f"layer {layer} was not measured; measured: {ranges(measured)} (counted from 0)"
            )
    return table.filter(pl.col("layer").is_in([int(layer) for layer in layers]))


def _amounts(table: pl.DataFrame, part: ClaimPart) -> pl.DataFrame:
    """One value per prompt, layer and head: heads combined, classes added up, normalised."""
    quantity = part.quantity
    table = tables.combine(table, part.scope.heads)
    declared = COLUMNS.get(quantity.measure)
    if declared is not None and declared.items:
        item = quantity.item[0] if quantity.item else declared.default
        # Runs of earlier builds have no item here.
        return table.filter(pl.col("item").is_null() | (pl.col("item") == item))
    if part.comparison.over == "item":
        table = tables.normalise(table, quantity.normalise)
        return table.filter(pl.col("item").is_in(_classes(table, part.comparison.pair or ())))
    if quantity.measure not in ("mass", "flow"):
        return table
    if quantity.normalise == "share":
        table = tables.normalise(table, "share")
    if quantity.item is not None:
        table = table.filter(pl.col("item").is_in(_classes(table, quantity.item)))
    if quantity.target is not None:
        table = table.filter(pl.col("target") == quantity.target)
    by = ["prompt", *(name for name in tables.IDENTITY if name != "item")]
    amounts = ("value", "uniform", "tokens")
    added = [pl.when(pl.col(c).null_count() == 0).then(pl.col(c).sum()).alias(c) for c in amounts]
    table = table.group_by(by, maintain_order=True).agg(*added)
    table = table.with_columns(pl.lit(None, dtype=pl.String()).alias("item"))
    return table if quantity.normalise == "share" else tables.normalise(table, quantity.normalise)


def _classes(table: pl.DataFrame, classes: Sequence[Any]) -> list[str]:
    """The classes as strings; a class that was not measured is an error."""
    measured = table["item"].drop_nulls().unique(maintain_order=True).to_list()
    for item in classes:
        if item not in measured:
            raise NotMeasuredError(
                f"class {item!r} was not measured; measured: {', '.join(measured)}"
            )
    return [str(item) for item in classes]


def _sides(
    table: pl.DataFrame, part: ClaimPart, models: tuple[str, str] | str, conditions: list[str]
) -> tuple[Matrix, Matrix]:
    """First and second of the comparison, prompt by prompt."""
    by, over = ["layer", "head"], part.comparison.over
    if over is None:
        b = matrix(table, by)
        level = float(part.comparison.threshold or 0.0)
        return Matrix(b.columns, b.prompts, np.full_like(b.x, level)), b
    pair: Sequence[Any] = part.comparison.pair or models
    if over == "condition":
        pair = conditions
    first, second = (table.filter(pl.col(over) == side) for side in pair)
    if over == "layer":  # both sides need the same layer number to be paired
        first = first.with_columns(pl.lit(pair[1], dtype=table.schema["layer"]).alias("layer"))
    alone = set(first["prompt"]) ^ set(second["prompt"])
    if alone or first.is_empty():
        raise NotPairedError(
            f"{over} {pair[0]} and {pair[1]} do not pair: prompts {ranges(alone)} have one alone"
        )
    a, b = (matrix(side, by) for side in (first, second))
    if not a.columns.equals(b.columns):
        raise NotPairedError(
            f"{over} {pair[0]} and {pair[1]} do not have the same layers and heads"
        )
    return a, b


def _decided(part: ClaimPart) -> list[pl.Expr]:
    """Whether a row supports the claim, and whether it opposes it."""
    rule, null = part.rule, null_of(part)
    low, high, difference = pl.col("low"), pl.col("high"), pl.col("difference")
    # If many prompts have no value, the rest is a selected sample.
    disqualified = pl.col("left_out") * ONE_IN > pl.col("n") + pl.col("left_out")
    enough = (pl.col("units") >= MINIMUM) & ~disqualified
    if rule.bounds is not None:
        supports = (low >= rule.bounds[0]) & (high <= rule.bounds[1])
        opposes = (low > rule.bounds[1]) | (high < rule.bounds[0])
    else:
        significant = pl.col("q") < rule.level
        above, below = significant & (difference > null), significant & (difference < null)
        if rule.kind == "interval":
            above, below = above & (low > null), below & (high < null)
        supports, opposes = (above, below) if part.direction == "more" else (below, above)
    return [
        disqualified.alias("disqualified"),
        (enough & supports).fill_null(False).alias("supports"),
        (enough & opposes).fill_null(False).alias("opposes"),
    ]


def _against(part: ClaimPart, models: tuple[str, str] | str, conditions: list[str]) -> str:
    comparison = part.comparison
    if comparison.over is None:
        return f"{comparison.threshold:g}"
    if comparison.over == "model":
        return str((comparison.pair or models)[0])
    if comparison.over == "condition":
        return conditions[0]
    assert comparison.pair is not None
    return f"layer {comparison.pair[0]}" if comparison.over == "layer" else str(comparison.pair[0])
