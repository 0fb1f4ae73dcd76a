"""Judges one claim under every choice of queries, keys, classes, normalisation, condition, share of
spikes and numbers that a run and the claim allow, and summarises which choices change the verdict.
"""

import heapq
import itertools
import math
from dataclasses import replace
from typing import Any

import polars as pl

from attnscope.errors import InputError, unknown
from attnscope.measures.registry import COLUMNS
from attnscope.run.tables import Values, possible
from attnscope.spec.claims import NORMALISE, Claim, Line, Quantity
from attnscope.spec.experiment import Experiment
from attnscope.stats.outcome import none_of
from attnscope.stats.verdicts import Verdict, judge

MOST = 64
"""The most combinations of choices that a claim is judged under."""
NUMBERS = ("as written", "lenient", "strict")
"""Margins, thresholds and shares of a claim are ours: half, or twice, as much is asked for."""
CHOICES = ("queries", "keys", "classes", "normalise", "condition", "spikes", "numbers")
"""What is varied if there is more than one value; `numbers` are margins, thresholds and shares."""
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("model", *CHOICES, "item", "kind", "position"), pl.String()),
    **dict.fromkeys(("layer", "count", "not_judged"), pl.Int64()),
    **dict.fromkeys(("difference", "low", "high", "p", "mean_a", "mean_b"), pl.Float64()),
}


def sensitivity(
    claim: Claim,
    values: Values,
    *,
    experiment: Experiment | None = None,
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
    settings |= {"experiment": experiment}
    verdicts = [v for v in judge([claim], table, **settings) if v.results] if table.height else []
    if not verdicts:
        raise InputError(
            f"claim {claim.name!r} cannot be judged on this run; it needs "
            f"{', '.join(claim.measures)}",
            code="not-measured",
            claim=claim.name,
            measures=list(claim.measures),
        )
    options = _options(claim, table, verdicts[0].condition, experiment)
    # The reference is the first of each choice.
    every = itertools.product(*(range(len(some)) for some in options.values()))
    ways = heapq.nsmallest(MOST, every, key=lambda way: sum(at > 0 for at in way))
    further = math.prod(map(len, options.values())) - len(ways)
    rows: list[dict[str, Any]] = []
    for way in sorted(ways):
        chosen = {name: options[name][at] for name, at in zip(CHOICES, way, strict=True)}
        changed = [name for name, at in zip(CHOICES, way, strict=True) if at]
        judged = judge([_changed(claim, chosen, changed)], table, **settings)
        about = {**chosen, **_insertion(chosen["condition"], experiment), "not_judged": further}
        about |= {"changed": ", ".join(changed), "reference": not changed}
        rows += [{**about, **_row(v, part)} for v in judged if v.results]
    first = {(row["model"], row["layer"]): row for row in rows if row["reference"]}
    for row in rows:
        same = first.get((row["model"], row["layer"]))
        for what in ("sign", "verdict"):
            row[f"same_{what}"] = None if same is None else row[what] == same[what]
    return pl.DataFrame(rows, schema_overrides=_TYPES, infer_schema_length=None).drop("sign")


def _options(
    claim: Claim, table: pl.DataFrame, condition: str | None, experiment: Experiment | None
) -> dict[str, list[Any]]:
    """The values of each choice; the first is that of the claim as written."""
    quantities, first = claim.quantities, claim.lines[0].left

    def present(column: str, rows: pl.DataFrame = table) -> list[Any]:
        return rows[column].drop_nulls().unique(maintain_order=True).to_list()

    options: dict[str, list[Any]] = {}
    for name in ("queries", "keys"):
        mine, others = getattr(first, name), present(name)
        if name == "keys":  # a claim about a region is about that region
            others = [key for key in others if {key, mine} <= {"all", "not-first"}]
        same = len({getattr(q, name) for q in quantities}) == 1  # else it is what is compared
        options[name] = [mine, *(others if same else [])]
    has = {key: set(rows["item"]) for (key,), rows in table.group_by("classes")}
    needed = {item for q in quantities for item in q.cls}
    sets = present("classes", table.filter(pl.col("measure") == first.measure))
    mine = first.classes or next(iter(sets), None)
    others = [one for one in present("classes") if mine and needed and needed <= has[one]]
    options["classes"] = [mine, *others]
    # A threshold is in the units of the quantity; all classes together have a share of 1.
    ratios = first.measure == "mass" and all(line.right is not None for line in claim.lines)
    scales = [how for how in NORMALISE if how != "share" or all(q.cls for q in quantities)]
    mine = first.scale if first.measure == "mass" else None
    options["normalise"] = [mine, *(scales if ratios else [])]
    mine = None if condition is None else condition.split(", ")[0]
    base = {q.selector for q in quantities} <= {"base", experiment.base if experiment else ""}
    fixed = {line.right.selector for line in claim.lines if line.right is not None}
    known = list(experiment.variants) if experiment and not base else present("condition")
    others = [one for one in known if mine and one in present("condition") and one not in fixed]
    options["condition"] = [mine, *others]
    spikes = [q for q in quantities if COLUMNS[q.measure].items]
    rows = table.filter(pl.col("measure").is_in([q.measure for q in spikes]))
    default = [(q.cls or (COLUMNS[q.measure].default,))[0] for q in spikes[:1]] or [None]
    options["spikes"] = [*default, *present("item", rows)]
    options["numbers"] = list(NUMBERS)
    return {name: list(dict.fromkeys(some)) for name, some in options.items()}


def _changed(claim: Claim, chosen: dict[str, Any], changed: list[str]) -> Claim:
    """The same claim with other choices."""
    varied = claim.lines[0].left.selector

    def quantity(old: Quantity) -> Quantity:
        named = ("queries", "keys", "classes")
        fields: dict[str, Any] = {n: chosen[n] for n in named if n in changed}
        if "normalise" in changed and old.measure == "mass":
            fields["scale"] = chosen["normalise"]
        if COLUMNS[old.measure].items:
            fields["cls"] = (chosen["spikes"],)
        if chosen["condition"] is not None and old.selector == varied:
            fields["condition"] = chosen["condition"]
        return replace(old, **fields)

    lines = tuple(asking(line, chosen["numbers"]) for line in claim.lines)
    return Claim(claim.name, lines).with_quantities(quantity)


def asking(line: Line, how: str) -> Line:
    """A line that asks for half, or for twice, as much beyond none; of a threshold, 20 % of its
    distance to the nearer end of the range less or more; of most heads a third or two thirds, of a
    number of heads half or twice as many."""
    if how == NUMBERS[0]:
        return line
    by = 0.5 if how == "lenient" else 2.0
    if line.scope.least == "most":
        line = replace(line, scope=replace(line.scope, share=1 / 3 if by < 1 else 2 / 3))
    elif isinstance(line.scope.least, int):
        line = replace(line, scope=replace(line.scope, least=max(1, round(by * line.scope.least))))
    if line.bounds is not None:
        middle = sum(line.bounds) / 2
        width = (line.bounds[1] - line.bounds[0]) / 2 / by
        return replace(line, bounds=(middle - width, middle + width))
    if line.right is not None:
        return replace(line, factor=1 + by * (line.factor - 1), offset=by * line.offset)
    ends = possible(line.left.measure, line.left.scale)
    nearer = min(abs(line.offset - end) if math.isfinite(end) else math.inf for end in ends)
    step = 0.2 * (nearer if math.isfinite(nearer) else abs(line.offset))
    lower = (by < 1) == (line.relation == "more")
    return replace(line, offset=line.offset + (-step if lower else step))


def _row(verdict: Verdict, part: int) -> dict[str, Any]:
    """The numbers of one line of a verdict."""
    line, result = verdict.lines[part], verdict.results[part]
    left, right, estimate = line.left, line.right, result.estimate
    none = none_of(line, result.kind)
    none = result.needed[0] if none is None else none
    return {
        "claim": verdict.claim,
        "model": verdict.model,
        "layer": verdict.layer,
        "measure": left.measure,
        "item": "+".join(left.cls) or None,
        "against": f"{result.needed[0]:g}" if right is None else _side(left, right),
        "scale": result.kind,
        "n": result.n,
        "mean_a": result.before,
        "mean_b": result.after,
        "difference": estimate,
        "low": result.low,
        "high": None if result.high == math.inf else result.high,
        "p": result.p,
        "sign": None if estimate is None else estimate > none,
        "verdict": verdict.verdict,
    }


def _side(left: Quantity, right: Quantity) -> str:
    """The right side in short: what differs from the left."""
    for name in ("model", "condition", "cls", "layer", "keys", "queries"):
        if (value := getattr(right, name)) != getattr(left, name):
            return "+".join(value) if isinstance(value, tuple) else f"{value}"
    return right.measure


def _insertion(condition: str | None, experiment: Experiment | None) -> dict[str, Any]:
    """What a condition inserts, where the experiment says."""
    what = experiment.conditions.get(condition or "") if experiment else None
    if what is None or what.insert is None:
        return {"kind": None, "count": None, "position": None}
    where = None if what.position is None else str(what.position)
    return {"kind": what.insert.kind, "count": what.insert.count, "position": where}


def robustness(table: pl.DataFrame) -> pl.DataFrame:
    """For each model and layer: under how many choices sign and verdict equal the reference, and
    the smallest sets of choices that change the verdict. Null without a reference."""
    judged = table.filter(pl.col("difference").is_not_null())
    survived = judged.group_by("claim", "model", "layer", maintain_order=True).agg(
        pl.len().alias("choices"),
        pl.col("verdict").filter(pl.col("reference")).first().alias("verdict"),
        pl.col("same_sign").sum().alias("same_sign"),
        pl.col("same_verdict").sum().alias("same_verdict"),
        pl.col("same_verdict").all(ignore_nulls=False).alias("survives"),
        pl.struct(*CHOICES, "changed").filter(~pl.col("same_verdict")).alias("overturned_by"),
    )
    words = [_fewest(rows) for rows in survived["overturned_by"].to_list()]
    return survived.with_columns(pl.Series("overturned_by", words, dtype=pl.List(pl.String())))


def robustness_summary(table: pl.DataFrame) -> dict[str, Any]:
    """One row for a claim, over all models and layers: the `verdict` of the reference, the number
    of `choices`, how many of the `verdicts` equal the reference (`same_verdict`), in how many
    `places` (model, layer) all do (`survives`), what overturns it (`overturned_by`), and how many
    combinations were `not_judged`."""
    places = robustness(table)
    overturned = []
    for model, layer, by in places.select("model", "layer", "overturned_by").iter_rows():
        where = ", ".join(filter(None, (model, None if layer is None else f"layer {layer}")))
        overturned += [f"{where}: {'; '.join(by)}" if where else "; ".join(by)] if by else []
    counted = places["verdict"].drop_nulls().value_counts(sort=True, name="n")
    words = [name if counted.height == 1 else f"{name} {n}" for name, n in counted.iter_rows()]
    judged = table.filter(pl.col("difference").is_not_null())
    return {
        "claim": table["claim"][0],
        "verdict": ", ".join(words) or None,
        "choices": judged.select(*CHOICES).n_unique(),
        "verdicts": judged.height,
        "same_verdict": int(judged["same_verdict"].sum()),
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


def _fewest(overturning: list[dict[str, Any]]) -> list[str]:
    """The smallest sets of choices that overturn the verdict."""
    sets = [
        {f"{name} {row[name]}" for name in row["changed"].split(", ") if name}
        for row in overturning
    ]
    fewest = [one for one in sets if not any(other < one for other in sets)]
    return list(dict.fromkeys(" and ".join(sorted(one)) for one in fewest if one))
