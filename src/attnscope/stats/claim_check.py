"""Finds, before a run, what its experiment lacks for a claim."""

from collections.abc import Mapping, Sequence

import polars as pl

from attnscope.measures.registry import COLUMNS
from attnscope.run.tables import ranges
from attnscope.spec.claims import Claim, Quantity
from attnscope.spec.experiment import Experiment
from attnscope.stats.evidence import NoEvidenceError, RunContents
from attnscope.stats.resampling import ResamplingUnits

COUNTS_QUERIES = {"sums", "flow", "rows"}
"""What a measure needs if it depends on the choice of queries."""


def lacking(claim: Claim, experiment: Experiment, layers: Mapping[str, Sequence[int]]) -> str:
    """What the experiment lacks for a claim; empty if nothing. `layers` are the measured layers of
    each model."""
    contents = RunContents(
        list(experiment.models),
        list(experiment.conditions),
        {m: pl.DataFrame() for m in claim.measures if COLUMNS[m].name in experiment.measures},
        ResamplingUnits(),
        {name: condition.kind for name, condition in experiment.conditions.items()},
    )
    try:
        for model, bound in contents.bound(claim):
            for line in bound.lines:
                for quantity in line.quantities:
                    _choices(quantity, experiment)
                    some = line.scope.layers if quantity.layer is None else (quantity.layer,)
                    _layers(some or (), layers[quantity.model or model or ""])
    except NoEvidenceError as why:
        return str(why)
    return ""


def _layers(named: Sequence[int], measured: Sequence[int]) -> None:
    """Check the layers that a line names."""
    if absent := set(named) - set(measured):
        raise NoEvidenceError(
            f"layer {ranges(absent, 3)} is not measured; measured: {ranges(measured, 3)} "
            "(counted from 0)"
        )


def _choices(quantity: Quantity, experiment: Experiment) -> None:
    """Check queries, keys and classes."""
    measure = COLUMNS[quantity.measure]
    of_queries = not measure.needs.isdisjoint(COUNTS_QUERIES)
    known = {
        "queries": list(experiment.queries) if of_queries else ["all"],
        "keys": list(experiment.keys) if "keys" in measure.per else ["all"],
    }
    for what, names in known.items():
        if (name := getattr(quantity, what)) not in names:
            raise NoEvidenceError(
                f"{quantity.measure!r} is not measured with {what}={name}; known: "
                f"{', '.join(names)}"
            )
    if measure.per.isdisjoint(("classes", "class pairs")):
        return
    sets = {label: [one.name for one in rules] for label, rules in experiment.classes.items()}
    chosen = [
        label
        for label, names in sets.items()
        if quantity.classes in (None, label) and set(quantity.cls) <= set(names)
    ]
    if not chosen:
        classes = "+".join(quantity.cls) or "any class"
        listed = "; ".join(f"{label}: {', '.join(names)}" for label, names in sets.items())
        raise NoEvidenceError(f"no class set has {classes}; known: {listed}")
    if len(chosen) > 1:
        raise NoEvidenceError(
            f"several class sets have these classes; write classes= one of {', '.join(chosen)}"
        )
