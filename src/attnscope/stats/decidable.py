"""What a run could show, before it is run: what its experiment lacks for a claim, and what so many
prompts can decide.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from scipy import stats

from attnscope.measures.registry import COLUMNS
from attnscope.spec.claims import Claim, Line, Quantity
from attnscope.spec.experiment import Experiment
from attnscope.stats.evidence import (
    NoEvidenceError,
    RunContents,
    check_layers,
    check_name,
    class_set,
    depends_on,
)
from attnscope.stats.families import prompts_for
from attnscope.stats.outcome import ALPHA, COUNTS
from attnscope.stats.resampling import ResamplingUnits


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
                    _check(quantity, experiment)
                    some = line.scope.layers if quantity.layer is None else (quantity.layer,)
                    check_layers(some or (), layers[quantity.model or model or ""])
    except NoEvidenceError as why:
        return str(why)
    return ""


def _check(quantity: Quantity, experiment: Experiment) -> None:
    """Check queries, keys and classes."""
    for what in ("queries", "keys"):
        known = getattr(experiment, what) if depends_on(quantity.measure, what) else ["all"]
        check_name(quantity, what, [*known])
    if not COLUMNS[quantity.measure].per.isdisjoint(("classes", "class pairs")):
        sets = {label: [one.name for one in rules] for label, rules in experiment.classes.items()}
        class_set(quantity, sets)


def detectable(n: int, tests: int = 1) -> float:
    """The difference, in standard deviations of the prompts, that n prompts find four times in
    five, in each of so many tests corrected together; nan if n prompts can find none."""
    if n < prompts_for(tests, ALPHA / 2):
        return float("nan")
    reach = stats.t.isf(ALPHA / 2 / tests, n - 1) + stats.t.isf(0.2, n - 1)
    return float(reach / np.sqrt(n))


class Decidable(NamedTuple):
    """What this many prompts or clusters can show for one line of a claim."""

    least: int
    """The smallest number of prompts or clusters that can decide it; 0: no number can."""
    text: str


def decidable(
    claim: Claim, units: Callable[[str | None], int], layers: int, heads: int
) -> list[Decidable]:
    """One for each line of a claim. `units` gives the number of prompts, or of clusters by a
    column; a model has so many layers with so many heads each."""
    lines = len(claim.lines)
    return [_line(line, lines, units(line.cluster), layers, heads) for line in claim.lines]


def _line(line: Line, lines: int, n: int, layers: int, heads: int) -> Decidable:
    scope = line.scope
    some = layers if scope.layers is None else len(scope.layers)
    tests = lines * (some if scope.kind == "each" else 1)
    rows = some * (heads if scope.kind == "heads" else 1)
    least = prompts_for(tests, ALPHA / 2)
    text = f"found four times in five if {detectable(n, tests):.2f} standard deviations beyond"
    if scope.kind in COUNTS:
        least, needed = prompts_for(rows, ALPHA / lines / 2), scope.needed(rows)
        text = f"can be decided, {needed} of {rows} {scope.kind}"
        if needed > rows:
            return Decidable(0, f"cannot tell: there are only {rows} {scope.kind}")
    if n < least:
        text = f"cannot tell: needs at least {least} prompts or clusters, not {n}"
    return Decidable(least, text)
