"""Judges claims from the table of values.

A verdict is supported, contradicted, undetermined or not measured.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from attnscope.spec.claims import Claim, digest
from attnscope.spec.experiment import Experiment
from attnscope.stats.contrast import ContrastSettings
from attnscope.stats.evidence import (
    NotMeasuredError,
    NotPairedError,
    RunContents,
    default_condition,
    evidence,
    measures,
    missing,
)
from attnscope.stats.outcome import (
    fill_statement,
    outcome_of,
    part_names,
    part_summary,
    sides_of,
)
from attnscope.stats.resampling import ResamplingUnits
from attnscope.stats.tables import Values

VERDICTS = ("supported", "contradicted", "undetermined", "not measured")
FROZEN = ("fixed before the run", "changed after the run", "added after the run")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of a run on a claim."""

    claim: str
    statement: str
    verdict: str
    """One of `VERDICTS`."""
    reason: str
    """The deciding numbers, the requirement and n. If not measured: what to measure."""
    model: str | None = None
    condition: str | None = None
    layer: int | None = None
    figures: pl.DataFrame | None = None
    """One row per part, layer and head: the comparison, and whether it supports the claim or
    opposes it."""
    frozen: str | None = None
    """When the claim was fixed: a text that begins with one of `FROZEN`; None if unknown."""

    @property
    def sentence(self) -> str:
        """The statement. If it does not name the model, the model's name comes first."""
        if self.model is None or self.model in self.statement:
            return self.statement
        return f"{self.model}: {self.statement}"

    def __str__(self) -> str:
        """The fixed layout: verdict, statement, result with interval, requirement, n."""
        return f"{self.verdict}: {self.sentence} {self.reason}"


def judge(
    claims: Iterable[Claim],
    values: Values,
    *,
    experiment: Experiment | None = None,
    pair: tuple[str, str] | None = None,
    frozen: Mapping[str, str] | None = None,
    prompts: pl.DataFrame | None = None,
    cluster: str | Sequence[str] | None = None,
    strata: str | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> list[Verdict]:
    """Verdicts on claims: one for each claim and each model, condition and layer it covers.

    experiment   the run's experiment (`Run.experiment`): gives the base condition, what the other
                 conditions insert, and the order of queries, keys and models
    pair         first and second model, for claims that compare models
    frozen       digests of the claims that were fixed before the run
    prompts      prompt metadata; `cluster` and `strata` as in `compare`
    """
    claims = list(claims)
    needed = {measure for claim in claims for part in claim.parts for measure in measures(part)}
    lazy = values.lazy()
    measured = lazy.select(pl.col("measure").unique()).collect()["measure"].to_list()
    table = lazy.filter(pl.col("measure").is_in(sorted(needed))).collect()
    # Split by measure: most rows are masses, and few claims need masses.
    tables = {str(rows["measure"][0]): rows for rows in table.partition_by("measure")}
    contents = RunContents(
        models=_ordered(lazy, "model", experiment.models if experiment else ()),
        conditions=_ordered(lazy, "condition", experiment.conditions if experiment else ()),
        insertions={
            name: condition.kind
            for name, condition in (experiment.conditions if experiment else {}).items()
        },
        measures=measured,
        first={
            what: list(getattr(experiment, what, ())) for what in ("queries", "keys", "classes")
        },
        settings=ContrastSettings(resamples=resamples, seed=seed),
        sources=ResamplingUnits(prompts, cluster, strata),
    )
    verdicts = [
        replace(verdict, frozen=_frozen(claim, frozen, contents.sources))
        for claim in claims
        for verdict in _judged(claim, tables, contents, pair)
    ]
    return _without_contradiction(verdicts, claims)


def _frozen(
    claim: Claim, written: Mapping[str, str] | None, sources: ResamplingUnits
) -> str | None:
    if written is None:
        return None
    if claim.name not in written:
        return FROZEN[2]
    if written[claim.name] != digest(claim):
        return FROZEN[1]
    units = ", ".join(sources.chosen)
    return FROZEN[0] + (f"; the units ({units}) were chosen afterwards" if units else "")


def _without_contradiction(verdicts: list[Verdict], claims: Sequence[Claim]) -> list[Verdict]:
    """Make two supported claims undetermined if they exclude each other.

    One of them must be a false positive.
    """
    excluded = {claim.name: set(claim.excludes) for claim in claims}
    supported = {
        (v.claim, v.model, v.condition, v.layer) for v in verdicts if v.verdict == "supported"
    }

    def other(verdict: Verdict) -> str | None:
        where = (verdict.model, verdict.condition, verdict.layer)
        if verdict.verdict != "supported":
            return None
        return next(
            (
                name
                for name, their in excluded.items()
                if (name, *where) in supported
                and (name in excluded[verdict.claim] or verdict.claim in their)
            ),
            None,
        )

    return [
        verdict
        if (name := other(verdict)) is None
        else replace(
            verdict,
            verdict="undetermined",
            reason=f"{name!r} is supported too, and the two claims exclude each other. "
            f"{verdict.reason}",
        )
        for verdict in verdicts
    ]


def verdict_table(verdicts: Sequence[Verdict]) -> pl.DataFrame:
    """Verdicts as a table, without their figures."""
    names = ("claim", "model", "condition", "layer", "verdict", "frozen", "statement", "reason")
    schema = {name: pl.Int64() if name == "layer" else pl.String() for name in names}
    rows = [[getattr(verdict, name) for name in names] for verdict in verdicts]
    return pl.DataFrame(rows, schema=schema, orient="row")


def _ordered(values: pl.LazyFrame, what: str, first: Iterable[str]) -> list[str]:
    """The values of a column: first the ones in `first`, in that order, then the others."""
    present = values.select(pl.col(what).unique(maintain_order=True)).collect()[what].to_list()
    listed = [name for name in first if name in present]
    return listed + [name for name in present if name not in listed]


def _judged(
    claim: Claim,
    tables: dict[str, pl.DataFrame],
    contents: RunContents,
    pair: tuple[str, str] | None,
) -> list[Verdict]:
    try:
        for measure in dict.fromkeys(m for part in claim.parts for m in measures(part)):
            if measure not in contents.measures:
                raise missing(measure)
        bindings = _bindings(claim, contents)
        pairs = _models(claim, contents, pair)
    except NotMeasuredError as why:
        words = fill_statement(claim.statement, sides_of(claim))
        return [Verdict(claim.name, words, "not measured", str(why))]
    verdicts = []
    for models, binding in itertools.product(pairs, bindings):
        verdicts += _bound(claim, tables, contents, models, binding)
    return verdicts


def _bindings(claim: Claim, contents: RunContents) -> list[dict[str, str]]:
    """Every assignment of the run's conditions to the claim's selectors."""
    selectors: list[str] = []
    if any(part.comparison.over != "condition" for part in claim.parts):
        selectors.append(default_condition(claim, contents))
    for part in claim.parts:
        if part.comparison.over == "condition":
            selectors += [str(side) for side in part.comparison.pair or ()]
    selectors = list(dict.fromkeys(selectors))
    ways = itertools.product(*(contents.matching(selector) for selector in selectors))
    bound = [dict(zip(selectors, way, strict=True)) for way in ways]
    pairs = [p.comparison.pair for p in claim.parts if p.comparison.over == "condition"]
    different = [
        way
        for way in bound
        if all(pair and way[str(pair[0])] != way[str(pair[1])] for pair in pairs)
    ]
    if not different:
        raise NotMeasuredError(
            f"the claim compares two conditions, and this run has only one that matches "
            f"{' and '.join(selectors)}; add another to the experiment's conditions"
        )
    return different


def _models(
    claim: Claim, contents: RunContents, pair: tuple[str, str] | None
) -> list[tuple[str, str] | str]:
    over = [part.comparison for part in claim.parts if part.comparison.over == "model"]
    if not over:
        return list(contents.models)
    named = next((c.pair for c in over if c.pair), None)
    chosen = (str(named[0]), str(named[1])) if named else pair
    if chosen is None:
        if len(contents.models) != 2:
            raise NotMeasuredError(
                f"the claim compares two models, and this run has {len(contents.models)}: "
                f"{', '.join(contents.models)}; choose two with `pair`, or add models to the "
                "experiment"
            )
        chosen = (contents.models[0], contents.models[1])
    for name in chosen:
        if name not in contents.models:
            raise NotMeasuredError(
                f"no model {name!r} in this run; it has {', '.join(contents.models)}"
            )
    return [chosen]


def _sides(claim: Claim, models: tuple[str, str] | str, binding: dict[str, str]) -> dict[str, str]:
    """The names of the two sides of the comparison: `a` is the first, `b` the second."""
    if isinstance(models, tuple):
        return {"a": models[0], "b": models[1]}
    sides = sides_of(claim)
    for part in claim.parts:
        if part.comparison.over == "condition" and part.comparison.pair:
            first, second = part.comparison.pair
            sides = {"a": binding[str(first)], "b": binding[str(second)]}
    return sides


def _bound(
    claim: Claim,
    tables: dict[str, pl.DataFrame],
    contents: RunContents,
    models: tuple[str, str] | str,
    binding: dict[str, str],
) -> list[Verdict]:
    """Verdicts for one model (or pair) and one choice of conditions."""
    model = models if isinstance(models, str) else None
    condition = ", ".join(dict.fromkeys(binding.values())) or None
    known: dict[str, Any] = {
        **_sides(claim, models, binding),
        "condition": condition,
        "model": model,
    }

    def verdict(outcome: str, reason: str, layer: int | None, figures: Any) -> Verdict:
        words = fill_statement(claim.statement, {**known, "layer": layer})
        if layer is not None and "{layer}" not in claim.statement:
            words = f"Layer {layer}: {words}"
        return Verdict(claim.name, words, outcome, reason, model, condition, layer, figures)

    try:
        rows = [
            evidence(
                claim,
                number,
                pl.concat([tables[measure] for measure in measures(part)]),
                contents,
                models,
                binding,
            )
            for number, part in enumerate(claim.parts)
        ]
    except NotMeasuredError as why:
        return [verdict("not measured", str(why), None, None)]
    except NotPairedError as why:
        return [verdict("undetermined", str(why), None, None)]
    each = any(part.scope.layers == "each" for part in claim.parts)
    layers = sorted({int(n) for part in rows for n in part["layer"]}) if each else [None]
    verdicts = []
    for layer in layers:
        chosen = [
            part.filter(pl.col("layer") == layer) if p.scope.layers == "each" else part
            for p, part in zip(claim.parts, rows, strict=True)
        ]
        outcomes = [outcome_of(p, part) for p, part in zip(claim.parts, chosen, strict=True)]
        reason = _reason(claim, chosen, outcomes)
        verdicts.append(verdict(_overall(outcomes), reason, layer, pl.concat(chosen)))
    return verdicts


def _overall(outcomes: Sequence[str]) -> str:
    """The verdict on a claim, from the outcomes of its parts: all of them must be supported."""
    if all(outcome == "supported" for outcome in outcomes):
        return "supported"
    return "contradicted" if "contradicted" in outcomes else "undetermined"


def _reason(claim: Claim, rows: Sequence[pl.DataFrame], outcomes: Sequence[str]) -> str:
    """The numbers of every part in one line. If there are several parts, each has its outcome."""
    lines = [
        part_summary(part, of_part, name)
        for part, of_part, name in zip(claim.parts, rows, part_names(claim), strict=True)
    ]
    if len(lines) > 1:
        lines = [f"{line} ({outcome})" for line, outcome in zip(lines, outcomes, strict=True)]
    return "; ".join(lines) + "."
