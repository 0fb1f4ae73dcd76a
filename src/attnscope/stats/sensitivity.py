"""Judges one claim under every choice of queries, keys, classes, normalisation, condition and share
of spikes that a run has.
"""

import itertools
import math
from typing import Any

import polars as pl

from attnscope.errors import InputError, unknown
from attnscope.spec.claims import Claim, ClaimPart
from attnscope.spec.experiment import Experiment
from attnscope.stats.evidence import item_of, measures
from attnscope.stats.robustness import CHOICES
from attnscope.stats.tables import NORMALISE, Values, combine
from attnscope.stats.verdicts import Verdict, judge

MOST = 64
"""The most combinations of choices that a claim is judged under."""


def sensitivity(
    claim: Claim,
    values: Values,
    *,
    experiment: Experiment | None = None,
    pair: tuple[str, str] | None = None,
    part: int = 0,
    **settings: Any,
) -> pl.DataFrame:
    """A row per combination of choices, model, layer and head, with the figures of one `part` of
    the claim, counted from 0, and the verdict on the whole claim; `settings` as for `judge`.

    Choices are compared with the reference: those of the claim itself, which for what it leaves
    open are the run's first; so also where several conditions are of the kind it names. `changed`
    names the choices that differ from it; `same_sign` and `same_verdict` say whether the direction
    and the verdict are those of the reference. At most `MOST` combinations are judged, those with
    the fewest changes; `not_judged` counts the others. `kind`, `count` and `position`
    describe the insertion of a condition.
    """
    if part not in range(len(claim.parts)):
        raise unknown(f"part of claim {claim.name!r}", part, range(len(claim.parts)))
    table = values.lazy().filter(pl.col("measure").is_in(_measures(claim))).collect()
    if table.is_empty():
        raise InputError(
            f"claim {claim.name!r} needs {', '.join(_measures(claim))}, which this run has not "
            "measured",
            code="not-measured",
            claim=claim.name,
            measures=_measures(claim),
        )
    settings |= {"experiment": experiment, "pair": pair}
    verdicts = judge([claim], table, **settings)
    if all(verdict.figures is None for verdict in verdicts):
        raise InputError(
            f"claim {claim.name!r} cannot be judged on this run: {verdicts[0].reason}",
            code="not-measured",
            claim=claim.name,
        )
    options = {name: _options(claim, table, name, experiment) for name in CHOICES}
    reference = _reference(verdicts, part)
    table = _in_scope(claim, table)
    rows = []
    combinations, further = _combinations(options, next(iter(reference.values())))
    for chosen in combinations:
        selected = _rows_for(claim, table, chosen)
        for verdict in judge([_changed(claim, chosen)], selected, **settings):
            rows += _rows(verdict, reference, part)
    if not rows:
        raise InputError(
            f"claim {claim.name!r} cannot be judged under any choice of this run",
            code="claim-without-choices",
            claim=claim.name,
        )
    rows_table = pl.DataFrame(rows, schema_overrides=_TYPES, infer_schema_length=None)
    rows_table = rows_table.unique(maintain_order=True)
    rows_table = rows_table.with_columns(pl.lit(further, dtype=pl.Int64()).alias("not_judged"))
    return _against_reference(_with_insertions(rows_table, experiment))


def _combinations(
    options: dict[str, list[Any]], reference: dict[str, Any]
) -> tuple[list[dict[str, Any]], int]:
    """At most `MOST` combinations of choices, and how many further ones there are. Those with the
    fewest changes against the reference come first: itself, each choice changed alone, two …"""
    reference_values = dict(reference)
    if reference_values["condition"] is not None:  # of a pair of conditions the second is varied
        reference_values["condition"] = reference_values["condition"].split(", ")[-1]
    names = list(options)
    changed = {
        name: [value for value in values if value not in (None, reference_values[name])]
        for name, values in options.items()
    }
    kept = {
        name: [value for value in options[name] if value not in changed[name]] for name in names
    }
    every = (
        dict(zip(names, way, strict=True))
        for many in range(len(names) + 1)
        for some in itertools.combinations(names, many)
        for way in itertools.product(*((changed if name in some else kept)[name] for name in names))
    )
    ways = sorted(
        itertools.islice(every, MOST),
        key=lambda way: [options[name].index(way[name]) for name in names],
    )
    return ways, math.prod(map(len, options.values())) - len(ways)


def _measures(claim: Claim) -> list[str]:
    return sorted({measure for part in claim.parts for measure in measures(part)})


def _options(
    claim: Claim, table: pl.DataFrame, name: str, experiment: Experiment | None
) -> list[Any]:
    """The values a choice can take; None stands for the claim's own."""
    quantities = [part.quantity for part in claim.parts]
    if name == "normalise":
        if not any("mass" in measures(part) for part in claim.parts):
            return [None]
        # All classes together have a share of 1, whatever the attention.
        all_classes = any(quantity.item is None for quantity in quantities)
        return [how for how in NORMALISE if how != "share" or not all_classes]
    if name == "spikes":
        return _items(claim, table)
    if any(part.comparison.over == name for part in claim.parts) and name != "condition":
        return [None]  # the pair of a comparison is no choice
    if name == "keys" and any(quantity.keys is not None for quantity in quantities):
        return [None]  # a claim about a region is about that region
    if name == "condition":
        over = [part for part in claim.parts if part.comparison.over == "condition"]
        if over:  # the second of the pair is varied, the first stays
            return list(experiment.variants if experiment else ()) or [None]
        return table["condition"].unique(maintain_order=True).to_list()
    present = table[name].drop_nulls().unique(maintain_order=True).to_list()
    listed = [one for one in getattr(experiment, name, ()) if one in present]
    present = listed + [one for one in present if one not in listed]
    if name == "classes" and len(present) > 1 and all(q.item is None for q in quantities):
        present = _distinct_sets(table, present)
    return present or [None]


def _items(claim: Claim, table: pl.DataFrame) -> list[Any]:
    """How many tokens count as spikes, where a claim is about them."""
    about = {m for part in claim.parts if item_of(part) is not None for m in measures(part)}
    present = table.filter(pl.col("measure").is_in(sorted(about)))["item"].drop_nulls()
    return present.unique(maintain_order=True).to_list() or [None]


def _distinct_sets(table: pl.DataFrame, sets: list[str]) -> list[str]:
    """Class sets that differ when all their classes are added up. Two sets that leave out no token
    do not: to count both would be to count one conclusion twice.
    """
    by = ["model", "prompt", "condition", "queries", "keys", "layer", "head", "measure"]
    amounts = ("value", "uniform", "tokens")
    kept: dict[str, pl.DataFrame] = {}
    for name in sets:
        added = table.filter(pl.col("classes") == name).group_by(by).agg(pl.col(amounts).sum())
        if not any(_same_values(added, other, by, amounts) for other in kept.values()):
            kept[name] = added
    return list(kept)


def _same_values(a: pl.DataFrame, b: pl.DataFrame, by: list[str], amounts: tuple[str, ...]) -> bool:
    if a.height != b.height:
        return False
    both = a.join(b, on=by, nulls_equal=True)
    near = [((pl.col(c) - pl.col(f"{c}_right")).abs() <= 1e-5 * pl.col(c).abs()) for c in amounts]
    return both.height == a.height and bool(both.select(pl.all_horizontal(near).all()).item())


def _in_scope(claim: Claim, table: pl.DataFrame) -> pl.DataFrame:
    """Less to look through for every choice: without layers that no part is about, and with heads
    combined already where all parts combine them alike.
    """
    heads = {part.scope.heads for part in claim.parts}
    if len(heads) == 1 and "each" not in heads:
        table = combine(table, heads.pop())
    layers: set[int] = set()
    for part in claim.parts:
        of_part = part.comparison.pair if part.comparison.over == "layer" else part.scope.layers
        if of_part is None or isinstance(of_part, str):
            return table
        layers |= {int(layer) for layer in of_part}
    return table.filter(pl.col("layer").is_in(sorted(layers)))


def _rows_for(claim: Claim, table: pl.DataFrame, chosen: dict[str, Any]) -> pl.DataFrame:
    """The rows that a claim with these choices needs."""
    between = any(part.comparison.over == "condition" for part in claim.parts)
    keep = [
        pl.col(name) == chosen[name]
        for name in ("queries", "keys", "classes", *(() if between else ("condition",)))
        if chosen[name] is not None
    ]
    return table.filter(*keep) if keep else table


def _changed(claim: Claim, chosen: dict[str, Any]) -> Claim:
    """The same claim with other choices."""
    condition = chosen["condition"]

    def part(old: ClaimPart) -> ClaimPart:
        updates = {
            name: chosen[name]
            for name in ("queries", "keys", "classes", "normalise")
            if chosen[name] is not None
        }
        comparison = old.comparison
        if condition is not None and comparison.over == "condition" and comparison.pair:
            pair = (comparison.pair[0], condition)
            comparison = comparison.model_copy(update={"pair": pair})
        if chosen["spikes"] is not None and item_of(old) is not None:
            updates["item"] = (chosen["spikes"],)
        quantity = old.quantity.model_copy(update=updates)
        return old.model_copy(update={"quantity": quantity, "comparison": comparison})

    return claim.model_copy(
        update={
            "condition": claim.condition if condition is None else condition,
            "parts": tuple(part(old) for old in claim.parts),
        }
    )


_SHOWN = (
    *("layer", "head", "measure", "item", "against", "scale", "n", "mean_a", "mean_b"),
    *("difference", "low", "high", "unreliable", "effect", "p", "q", "supports", "opposes"),
)
_MADE = ("queries", "keys", "classes", "normalise")


_TYPES = {
    **{name: pl.String() for name in ("model", *_MADE, "condition", "spikes", "item")},
    "layer": pl.Int64(),
    "head": pl.Int64(),
}


def _reference(verdicts: list[Verdict], part: int) -> dict[str | None, dict[str, Any]]:
    """The choices of the claim itself, by model: those of its first verdict that has figures."""
    by_model: dict[str | None, dict[str, Any]] = {}
    for verdict in verdicts:
        if verdict.figures is not None and verdict.model not in by_model:
            first = verdict.figures.filter(pl.col("part") == part).row(0, named=True)
            by_model[verdict.model] = _choices(verdict, first)
    return by_model


def _choices(verdict: Verdict, row: dict[str, Any]) -> dict[str, Any]:
    """The choices behind a row; how many tokens count as spikes, in whichever part says so."""
    assert verdict.figures is not None
    spikes = verdict.figures["spikes"].drop_nulls()
    return {
        **{name: row[name] for name in _MADE},
        "condition": verdict.condition,
        "spikes": spikes[0] if len(spikes) else None,
    }


def _rows(
    verdict: Verdict, references: dict[str | None, dict[str, Any]], part: int
) -> list[dict[str, Any]]:
    if verdict.figures is None:
        return []
    # A model whose own choices have no figures is held against those of the others.
    reference = references.get(verdict.model) or next(iter(references.values()))
    rows = []
    for row in verdict.figures.filter(pl.col("part") == part).iter_rows(named=True):
        choices = _choices(verdict, row)
        changed = [name for name in CHOICES if choices[name] != reference[name]]
        rows.append(
            {
                "claim": verdict.claim,
                "model": verdict.model,
                **choices,
                **{name: row[name] for name in _SHOWN},
                "verdict": verdict.verdict,
                "changed": ", ".join(changed),
                "reference": not changed,
            }
        )
    return rows


def _with_insertions(table: pl.DataFrame, experiment: Experiment | None) -> pl.DataFrame:
    """What a condition inserts, where it is one condition and the experiment says."""
    known: dict[str, dict[str, Any]] = {
        name: {**what.insert.model_dump(), "position": what.position}
        for name, what in (experiment.conditions if experiment else {}).items()
        if what.insert is not None
    }
    names = [str(name).split(", ")[-1] for name in table["condition"]]

    def column(what: str) -> list[Any]:
        return [known.get(name, {}).get(what) for name in names]

    return table.with_columns(
        pl.Series("kind", column("kind"), dtype=pl.String()),
        pl.Series("count", column("count"), dtype=pl.Int64()),
        pl.Series("position", [None if p is None else str(p) for p in column("position")]).cast(
            pl.String()
        ),
    )


def _against_reference(table: pl.DataFrame) -> pl.DataFrame:
    """Whether sign and verdict are those of the reference for the same model, layer and head."""
    equal = pl.when(pl.col("scale") == "ratio").then(1.0).otherwise(0.0)
    table = table.with_columns((pl.col("difference") - equal).sign().alias("sign"))
    by = ["model", "layer", "head"]
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
