"""Reads the quantities of a claim from the table of values, one value per prompt and row."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import polars as pl

from attnscope.measures.registry import COLUMNS
from attnscope.run import tables
from attnscope.run.tables import Matrix, Values, matrix, ranges
from attnscope.spec.claims import Claim, Line, Quantity, Scope
from attnscope.spec.experiment import Experiment
from attnscope.stats.resampling import ResamplingUnits

COUNTS_QUERIES = {"sums", "flow", "rows"}
"""What a measure needs if it depends on the choice of queries."""


class NoEvidenceError(Exception):
    """The run lacks a measurement, and the message names what to measure; or, if it is
    `measured`, its values cannot decide the claim."""

    def __init__(self, message: str, *, measured: bool = False) -> None:
        super().__init__(message)
        self.measured = measured


@dataclass(frozen=True, slots=True)
class RunContents:
    """What a run contains, and its resampling units."""

    models: list[str]
    conditions: list[str]
    tables: Mapping[str, pl.DataFrame]
    """The rows of each measure."""
    sources: ResamplingUnits
    insertions: Mapping[str, str | None] = field(default_factory=dict)
    """The kind of insertion of each condition; None for the base. Empty if unknown."""
    pair: tuple[str, str] | None = None
    """The models `a` and `b`."""

    @classmethod
    def of(
        cls,
        values: Values,
        measures: Iterable[str],
        sources: ResamplingUnits,
        experiment: Experiment | None,
        pair: tuple[str, str] | None,
    ) -> "RunContents":
        """The contents of a table of values; names in the order of the experiment."""
        lazy = values.lazy()
        rows = lazy.filter(pl.col("measure").is_in(sorted(measures))).collect()
        conditions = experiment.conditions if experiment else {}

        def present(what: str, first: Iterable[str]) -> list[str]:
            names = lazy.select(pl.col(what).unique(maintain_order=True)).collect()[what].to_list()
            return sorted(names, key=[*first, *names].index)

        return cls(
            present("model", experiment.models if experiment else ()),
            present("condition", conditions),
            {str(part["measure"][0]): part for part in rows.partition_by("measure")},
            sources,
            {name: condition.kind for name, condition in conditions.items()},
            pair,
        )

    def bound(self, claim: Claim) -> list[tuple[str | None, Claim]]:
        """The claim with the names of the run, in every assignment of its conditions; each with
        the model of the quantities that name none: every model of the run."""
        for measure in claim.measures:
            if measure not in self.tables:
                declared = COLUMNS[measure]
                also = ", with a condition that has an insertion"
                raise NoEvidenceError(
                    f"{measure!r} was not measured; add {declared.name!r} to the experiment's "
                    f"measures{also if declared.compares_to_base else ''}"
                )
        labels = self._labels([q.model for q in claim.quantities if q.model is not None])
        selectors = list(dict.fromkeys(quantity.selector for quantity in claim.quantities))
        ways = itertools.product(*(self.matching(selector) for selector in selectors))
        bound = [dict(zip(selectors, way, strict=True)) for way in ways]
        # Two sides with two selectors are two conditions.
        pairs = [(line.left.selector, line.right.selector) for line in claim.lines if line.right]
        good = [way for way in bound if all(a == b or way[a] != way[b] for a, b in pairs)]
        if not good:
            raise NoEvidenceError(
                f"the claim compares two conditions, and this run has only one that matches "
                f"{' and '.join(selectors)}; add another to the experiment's conditions"
            )

        def named(way: dict[str, str]) -> Claim:
            return claim.with_quantities(
                lambda q: replace(
                    q, model=labels.get(q.model or "", q.model), condition=way[q.selector]
                )
            )

        unnamed = any(quantity.model is None for quantity in claim.quantities)
        alone: list[str] | list[None] = self.models if unnamed else [None]
        return [(model, named(way)) for model, way in itertools.product(alone, good)]

    def _labels(self, named: list[str]) -> dict[str, str]:
        """The labels behind `a` and `b`; a name that is no model of the run is an error."""
        models: dict[str, str] = {}
        if {"a", "b"} & set(named) - set(self.models):
            two = self.pair or tuple(self.models)
            if len(two) != 2:
                raise NoEvidenceError(
                    f"the claim compares two models, and this run has {len(two)}: "
                    f"{', '.join(two)}; choose two with `pair`, or add models to the experiment"
                )
            models = {"a": two[0], "b": two[1]}
        for name in [*(models.get(name, name) for name in named), *models.values()]:
            if name not in self.models:
                raise NoEvidenceError(
                    f"no model {name!r} in this run; it has {', '.join(self.models)}"
                )
        return models

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
        raise NoEvidenceError(
            f"no condition {selector!r} in this run (it has {', '.join(known)}); "
            f"add one {what or 'of that name'} to the experiment's conditions"
        )


def read_claim(
    claim: Claim, contents: RunContents, model: str | None
) -> list[tuple[Matrix | None, Matrix]]:
    """The right and the left side of each line of a bound claim: the same prompts, layers and
    heads."""
    samples = [_sides(line, contents, model) for line in claim.lines]
    columns = [b.columns for _, b in samples]
    if claim.lines[0].scope.kind == "each" and not all(columns[0].equals(one) for one in columns):
        why = "the lines do not have the same layers; write 'in each of layers …'."
        raise NoEvidenceError(why, measured=True)
    for line in claim.lines:
        if line.cluster not in (None, *contents.sources.names):
            known = ", ".join(contents.sources.names) or "none"
            raise NoEvidenceError(
                f"the prompts have no metadata column {line.cluster!r}; they have: {known}"
            )
    return samples


def _sides(line: Line, contents: RunContents, model: str | None) -> tuple[Matrix | None, Matrix]:
    b = _values(line.left, line.scope, contents, model)
    if line.right is None:
        return None, b
    a = _values(line.right, line.scope, contents, model)
    if alone := set(a.prompts) ^ set(b.prompts):
        why = f"only one side has prompts {ranges(alone)}; finish the run."
        raise NoEvidenceError(why, measured=True)
    if not a.columns.equals(b.columns):
        why = "the two sides do not have the same layers and heads."
        raise NoEvidenceError(why, measured=True)
    return a, b


def _values(quantity: Quantity, scope: Scope, contents: RunContents, model: str | None) -> Matrix:
    """One value per prompt and row: the layers or heads of the scope, or one row."""
    measure, model, condition = quantity.measure, quantity.model or model, quantity.condition
    table = contents.tables[measure].filter(
        pl.col("model") == model, pl.col("condition") == condition
    )
    if table.is_empty():
        raise NoEvidenceError(f"{measure!r} was not measured in condition {condition} of {model}")
    for what in ("queries", "keys"):
        if named := table[what].drop_nulls().unique(maintain_order=True).to_list():
            table = table.filter(pl.col(what) == check_name(quantity, what, named))
    if table["classes"].null_count() < table.height:
        sets = {name: sorted(set(rows["item"])) for (name,), rows in table.group_by("classes")}
        table = table.filter(pl.col("classes") == class_set(quantity, sets))
    layers = scope.layers if quantity.layer is None else (quantity.layer,)
    if layers is not None:
        check_layers(layers, table["layer"].unique())
        table = table.filter(pl.col("layer").is_in(layers))
    if scope.kind == "heads" and table["head"].null_count():
        raise NoEvidenceError(f"{measure!r} has one value per layer, not per head")
    table = _amounts(tables.combine(table, "each" if scope.kind == "heads" else "mean"), quantity)
    if scope.kind != "mean":
        return matrix(table, ["layer", "head"])
    # A prompt without a value in one layer has no mean: it would be another quantity.
    known = pl.col("value").null_count() + pl.col("value").is_nan().sum() == 0
    table = table.group_by("prompt").agg(pl.when(known).then(pl.col("value").mean()))
    one = pl.lit(None, dtype=pl.Int64())
    return matrix(table.with_columns(one.alias("layer"), one.alias("head")), ["layer", "head"])


def depends_on(measure: str, what: str) -> bool:
    """Whether a measure has a value for each of the experiment's `queries` or `keys`."""
    declared = COLUMNS[measure]
    return what in declared.per if what == "keys" else not declared.needs.isdisjoint(COUNTS_QUERIES)


def check_name(quantity: Quantity, what: str, known: Sequence[str]) -> str:
    """The queries or keys of a quantity, which must be known."""
    measure, name = quantity.measure, getattr(quantity, what)
    if name in known:
        return str(name)
    add = f", or add {name!r} to the experiment's {what}" if depends_on(measure, what) else ""
    raise NoEvidenceError(
        f"{measure!r} is not measured with {what}={name}; known: {', '.join(known)}; write "
        f"{measure}[{what}={known[0]}]{add}"
    )


def class_set(quantity: Quantity, sets: Mapping[str, Collection[str]]) -> str:
    """The named class set, or the only one that has these classes."""
    fits = [n for n in sets if quantity.classes in (None, n) and set(quantity.cls) <= set(sets[n])]
    if len(fits) == 1:
        return fits[0]
    if fits:
        why = f"several class sets have these classes; write classes= one of {', '.join(fits)}"
        raise NoEvidenceError(why, measured=True)
    listed = "; ".join(f"{name}: {', '.join(items)}" for name, items in sets.items())
    classes = "+".join(quantity.cls) or "any class"
    raise NoEvidenceError(f"no class set has {classes}; known: {listed}")


def check_layers(named: Iterable[int], measured: Iterable[int]) -> None:
    """Refuse layers that are not measured."""
    if absent := set(named) - set(measured):
        raise NoEvidenceError(
            f"layer {ranges(absent, 3)} is not measured; measured: {ranges(measured, 3)} "
            "(counted from 0)"
        )


def _amounts(table: pl.DataFrame, quantity: Quantity) -> pl.DataFrame:
    """Classes added up, and normalised."""
    declared = COLUMNS[quantity.measure]
    if declared.items:
        return table.filter(pl.col("item") == (quantity.cls or (declared.default,))[0])
    if quantity.scale == "share":
        table = tables.normalise(table, "share")
    if quantity.cls:
        table = table.filter(pl.col("item").is_in(quantity.cls))
    if quantity.to is not None:
        table = table.filter(pl.col("target") == quantity.to)
    if quantity.measure not in ("mass", "flow"):
        return table
    by = ["prompt", *(name for name in tables.IDENTITY if name not in ("item", "target"))]
    amounts = ("value", "uniform", "tokens")
    added = [pl.when(pl.col(c).null_count() == 0).then(pl.col(c).sum()).alias(c) for c in amounts]
    table = table.group_by(by, maintain_order=True).agg(*added)
    table = table.with_columns(pl.lit(None, dtype=pl.String()).alias("item"))
    return table if quantity.scale == "share" else tables.normalise(table, quantity.scale)
