"""Judges one claim under every choice of queries, keys, classes, normalisation, condition, share of
spikes and numbers that a run and the claim allow.
"""

import itertools
import math
from dataclasses import replace
from typing import Any

import polars as pl

from attnscope.errors import InputError, unknown
from attnscope.measures.registry import COLUMNS
from attnscope.spec.claims import NORMALISE, Claim, Line, Quantity
from attnscope.spec.experiment import Experiment
from attnscope.stats.robustness import CHOICES
from attnscope.stats.tables import Values
from attnscope.stats.verdicts import Verdict, judge

MOST = 64
"""The most combinations of choices that a claim is judged under."""
NUMBERS = ("as written", "lenient", "strict")
"""Margins, thresholds and shares of a claim are ours: half, or twice, as much is asked for."""


def sensitivity(
    claim: Claim,
    values: Values,
    *,
    experiment: Experiment | None = None,
    pair: tuple[str, str] | None = None,
    part: int = 0,
    **settings: Any,
) -> pl.DataFrame:
    """A row per combination of choices, model and layer, with the numbers of one `part` (line) of
    the claim, counted from 0, and the verdict on the whole claim; `settings` as for `judge`.

    Choices are compared with the reference: those of the claim as written, with the run's first of
    several conditions. `changed` names the choices that differ from it; `same_sign` and
    `same_verdict` say whether the direction and the verdict are those of the reference. At most
    `MOST` combinations are judged, those with the fewest changes; `not_judged` counts the others.
    `kind`, `count` and `position` describe the insertion of a condition.
    """
    if part not in range(len(claim.lines)):
        raise unknown(f"part of claim {claim.name!r}", part, range(len(claim.lines)))
    table = values.lazy().filter(pl.col("measure").is_in(claim.measures)).collect()
    settings |= {"experiment": experiment, "pair": pair}
    verdicts = [v for v in judge([claim], table, **settings) if v.results] if table.height else []
    if not verdicts:
        raise InputError(
            f"claim {claim.name!r} cannot be judged on this run; it needs "
            f"{', '.join(claim.measures)}",
            code="not-measured",
            claim=claim.name,
            measures=list(claim.measures),
        )
    reference = _reference(claim, table, verdicts[0])
    options = {name: _options(name, claim, table, reference[name], experiment) for name in CHOICES}
    combinations, further = _combinations(options, reference)
    rows = []
    for chosen in combinations:
        judged = judge([_changed(claim, chosen, reference)], table, **settings)
        rows += [_row(v, chosen, reference, part) for v in judged if v.results]
    rows_table = pl.DataFrame(rows, schema_overrides=_TYPES, infer_schema_length=None)
    rows_table = rows_table.with_columns(pl.lit(further, dtype=pl.Int64()).alias("not_judged"))
    return _against_reference(_with_insertions(rows_table, experiment))


def _combinations(
    options: dict[str, list[Any]], reference: dict[str, Any]
) -> tuple[list[dict[str, Any]], int]:
    """At most `MOST` combinations of choices, and how many further ones there are. Those with the
    fewest changes against the reference come first: itself, each choice changed alone, two …"""
    names = list(options)
    changed = {name: [v for v in options[name] if v != reference[name]] for name in names}
    every = (
        reference | dict(zip(some, way, strict=True))
        for many in range(len(names) + 1)
        for some in itertools.combinations(names, many)
        for way in itertools.product(*(changed[name] for name in some))
    )
    ways = sorted(
        itertools.islice(every, MOST),
        key=lambda way: [options[name].index(way[name]) for name in names],
    )
    return ways, math.prod(map(len, options.values())) - len(ways)


def _reference(claim: Claim, table: pl.DataFrame, verdict: Verdict) -> dict[str, Any]:
    """The choices of the claim as written."""
    first = claim.lines[0].left
    spikes = [q for line in claim.lines for q in line.quantities if COLUMNS[q.measure].items]
    sets = table.filter(pl.col("measure") == first.measure)["classes"].drop_nulls()
    class_set = first.classes or next((name for name in sets.unique(maintain_order=True)), None)
    return {
        "queries": first.queries,
        "keys": first.keys,
        "classes": class_set,
        "normalise": first.scale if first.measure == "mass" else None,
        "condition": None if verdict.condition is None else verdict.condition.split(", ")[0],
        "spikes": (spikes[0].cls or (COLUMNS[spikes[0].measure].default,))[0] if spikes else None,
        "numbers": NUMBERS[0],
    }


def _options(
    name: str, claim: Claim, table: pl.DataFrame, current: Any, experiment: Experiment | None
) -> list[Any]:
    """The values a choice can take, that of the claim among them."""
    quantities = [quantity for line in claim.lines for quantity in line.quantities]
    if name == "numbers":
        return list(NUMBERS)
    if current is None:
        return [None]
    if name == "normalise":
        if any(line.right is None for line in claim.lines):
            return [current]  # a threshold is in the units of the quantity
        # All classes together have a share of 1, whatever the attention.
        return [how for how in NORMALISE if how != "share" or all(q.cls for q in quantities)]
    if name == "spikes":
        some = [q.measure for q in quantities if COLUMNS[q.measure].items]
        items = table.filter(pl.col("measure").is_in(some))["item"].drop_nulls()
        return items.unique(maintain_order=True).to_list()
    if name == "condition":
        present = table["condition"].unique(maintain_order=True).to_list()
        base = {q.selector for q in quantities} <= {"base", experiment.base if experiment else ""}
        variants = list(experiment.variants) if experiment and not base else present
        right = {line.right.selector for line in claim.lines if line.right is not None}
        return [current, *(c for c in variants if c in present and c != current and c not in right)]
    present = table[name].drop_nulls().unique(maintain_order=True).to_list()
    if name == "classes":
        needed = {item for q in quantities for item in q.cls}
        has = {key: set(rows["item"]) for (key,), rows in table.group_by("classes")}
        return [current, *(s for s in present if s != current and needed and needed <= has[s])]
    if len({getattr(q, name) for q in quantities}) > 1:
        return [current]  # the two sides of a comparison are no choice
    if name == "keys":  # a claim about a region is about that region
        present = [k for k in present if {k, current} <= {"all", "not-first"}]
    return [current, *(value for value in present if value != current)]


def _changed(claim: Claim, chosen: dict[str, Any], reference: dict[str, Any]) -> Claim:
    """The same claim with other choices."""
    varied = claim.lines[0].left.selector

    def quantity(old: Quantity) -> Quantity:
        new = old
        for name in ("queries", "keys"):
            if chosen[name] != reference[name]:
                new = replace(new, **{name: chosen[name]})
        if chosen["classes"] != reference["classes"]:
            new = replace(new, classes=chosen["classes"])
        if chosen["normalise"] != reference["normalise"] and old.measure == "mass":
            new = replace(new, scale=chosen["normalise"])
        if chosen["spikes"] is not None and COLUMNS[old.measure].items:
            new = replace(new, cls=(chosen["spikes"],))
        if chosen["condition"] is not None and old.selector == varied:
            new = replace(new, condition=chosen["condition"])
        return new

    def line(old: Line) -> Line:
        right = None if old.right is None else quantity(old.right)
        return _asking(replace(old, left=quantity(old.left), right=right), chosen["numbers"])

    return Claim(claim.name, tuple(map(line, claim.lines)))


def _asking(line: Line, how: str) -> Line:
    """A line that asks for half, or for twice, as much beyond none; of a threshold 20 % less or
    more, and of most heads a third or two thirds."""
    if how == NUMBERS[0]:
        return line
    by = 0.5 if how == "lenient" else 2.0
    scope = line.scope
    if scope.least == "most":
        scope = replace(scope, share=1 / 3 if by < 1 else 2 / 3)
    if line.bounds is not None:
        middle = sum(line.bounds) / 2
        width = (line.bounds[1] - line.bounds[0]) / 2 / by
        return replace(line, bounds=(middle - width, middle + width), scope=scope)
    if line.right is not None:
        factor = 1 + by * (line.factor - 1)
        return replace(line, factor=factor, offset=by * line.offset, scope=scope)
    easier = (by < 1) == (line.relation == "more")
    return replace(line, offset=line.offset * (0.8 if easier else 1.2), scope=scope)


_TYPES = {
    **{name: pl.String() for name in ("model", *CHOICES, "item")},
    "layer": pl.Int64(),
    "head": pl.Int64(),
    **{name: pl.Float64() for name in ("difference", "low", "high", "p", "mean_a", "mean_b")},
}


def _row(
    verdict: Verdict, chosen: dict[str, Any], reference: dict[str, Any], part: int
) -> dict[str, Any]:
    line, result = verdict.lines[part], verdict.results[part]
    changed = [name for name in CHOICES if chosen[name] != reference[name]]
    right = line.right
    none = {"ratio": 1.0, "difference": 0.0}.get(result.kind, result.needed[0])
    return {
        "claim": verdict.claim,
        "model": verdict.model,
        **chosen,
        "layer": verdict.layer,
        "head": None,
        "measure": line.left.measure,
        "item": "+".join(line.left.cls) or None,
        "against": f"{result.needed[0]:g}" if right is None else _side(line),
        "scale": result.kind,
        "n": result.n,
        "mean_a": result.before,
        "mean_b": result.after,
        "difference": result.estimate,
        "low": result.low,
        "high": None if result.high == math.inf else result.high,
        "p": result.p,
        "sign": None if result.estimate is None else float((result.estimate > none) * 2 - 1),
        "verdict": verdict.verdict,
        "changed": ", ".join(changed),
        "reference": not changed,
    }


def _side(line: Line) -> str:
    """The right side in short: what differs from the left."""
    left, right = line.left, line.right
    assert right is not None
    for name in ("model", "condition", "cls", "layer", "keys", "queries"):
        if getattr(left, name) != getattr(right, name):
            value = getattr(right, name)
            return "+".join(value) if isinstance(value, tuple) else f"{value}"
    return right.measure


def _with_insertions(table: pl.DataFrame, experiment: Experiment | None) -> pl.DataFrame:
    """What a condition inserts, where the experiment says."""
    known: dict[str, dict[str, Any]] = {
        name: {**what.insert.model_dump(), "position": what.position}
        for name, what in (experiment.conditions if experiment else {}).items()
        if what.insert is not None
    }

    def column(what: str) -> list[Any]:
        return [known.get(str(name), {}).get(what) for name in table["condition"]]

    places = [None if where is None else str(where) for where in column("position")]
    return table.with_columns(
        pl.Series("kind", column("kind"), dtype=pl.String()),
        pl.Series("count", column("count"), dtype=pl.Int64()),
        pl.Series("position", places, dtype=pl.String()),
    )


def _against_reference(table: pl.DataFrame) -> pl.DataFrame:
    """Whether sign and verdict are those of the reference for the same model and layer."""
    by = ["model", "layer"]
    first = (
        table.filter(pl.col("reference"))
        .group_by(by, maintain_order=True)
        .agg(pl.col("sign").first().alias("sign_0"), pl.col("verdict").first().alias("verdict_0"))
    )
    return (
        table.join(first, on=by, how="left", nulls_equal=True, maintain_order="left")
        .with_columns(
            (pl.col("sign") == pl.col("sign_0")).alias("same_sign"),
            (pl.col("verdict") == pl.col("verdict_0")).alias("same_verdict"),
        )
        .drop("sign", "sign_0", "verdict_0")
    )
