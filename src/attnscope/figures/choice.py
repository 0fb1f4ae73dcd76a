"""Which part of a run a figure shows: models, layers, heads, prompts, queries, keys, classes.

Nothing here changes a number. What was asked for and does not exist is an error that lists what
does. This module must not know charts or statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import polars as pl

from attnscope.errors import InputError, unknown
from attnscope.figures.figure import Run

__all__ = [
    "Choice",
    "Rows",
    "base_conditions",
    "bundled",
    "condition_fillers",
    "condition_kinds",
    "conditions_in_order",
    "heads_way",
    "models_in_order",
    "profiles",
    "rows",
]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What to show; None is everything, or the first where only one can be shown."""

    models: Sequence[str] | None = None
    layers: Sequence[int] | None = None
    heads: Sequence[int] | Mapping[str, int] | None = None
    """Heads from 0, or one head per model by its label."""
    conditions: Sequence[str] | None = None
    prompts: Sequence[int] | None = None
    queries: str | None = None
    keys: str | None = None
    classes: str | None = None
    """Name of the class set."""
    items: Sequence[str] | None = None
    """Names of classes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            one = isinstance(value, str) and field.name not in ("queries", "keys", "classes")
            if one or isinstance(value, int):
                object.__setattr__(self, field.name, (value,))
            elif value is not None and not isinstance(value, str) and len(value) == 0:
                raise InputError(f"{field.name} is empty; leave it out to show everything")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of `values` that were chosen, and how they were measured."""

    frame: pl.DataFrame
    models: list[str]
    """Labels of what is compared: models, or `model, condition` where conditions are folded in."""
    sources: list[str]
    """The models themselves."""
    conditions: list[str]
    layers: list[int]
    items: list[str]
    absent: list[str]
    """Classes of the set that no shown text has a token of; not among `items`."""
    queries: str
    keys: str
    classes: str | None
    not_numbers: int
    """Rows whose value was not defined (null or NaN): left out of every mean."""


def models_in_order(run: Run, found: Iterable[str]) -> list[str]:
    """Models in the order of the experiment."""
    present = set(found)
    listed = [m for m in run.environment.get("models", {}) if m in present]
    return listed + sorted(present - set(listed))


def base_conditions(run: Run) -> set[str]:
    """The condition that the others are compared with."""
    return {run.experiment.base}


def conditions_in_order(run: Run, found: Iterable[str]) -> list[str]:
    """Base first, then the experiment's order, then by length."""
    present, base = set(found), base_conditions(run)
    asked = list(run.experiment.conditions)
    lengths = dict(run.cells.group_by("condition").agg(pl.col("filler_tokens").mean()).iter_rows())

    def rank(name: str) -> tuple[bool, int, float, str]:
        place = asked.index(name) if name in asked else len(asked)
        return (name not in base, place, lengths.get(name) or 0.0, name)

    return sorted(present, key=rank)


def condition_kinds(run: Run) -> dict[str, str]:
    """What was inserted, by condition, as far as the experiment says: repeat, sentence …"""
    conditions = run.experiment.conditions
    return {name: what.insert.kind for name, what in conditions.items() if what.insert is not None}


def condition_fillers(run: Run) -> dict[str, str]:
    """What was inserted and where, whatever its length, by condition: `repeat '/', between`."""
    conditions = run.experiment.conditions
    ways = {conditions[name].by for name in run.experiment.variants}
    fillers = {}
    for name, what in conditions.items():
        if what.insert is not None:
            unit = f" {what.insert.unit!r}" if what.insert.unit is not None else ""
            by = [f"by {what.by}"] if len(ways) > 1 else []
            fillers[name] = ", ".join([f"{what.insert.kind}{unit}", str(what.position), *by])
    return fillers


def bundled(run: Run, models: Iterable[str]) -> list[str]:
    """The shown models that come with this package: tiny, and trained by its authors."""
    known = run.environment.get("models", {})
    return [m for m in models if known.get(m, {}).get("bundled")]


def heads_way(run: Run, asked: str | None) -> str:
    """How heads are combined: as asked, else as the experiment says, else the mean."""
    ways = ("mean", "sum", "max")
    if asked is None:
        said = run.experiment.combine
        return said if said in ways else "mean"
    if asked not in ways:
        raise unknown("way to combine heads", asked, ways)
    return asked


def _only(what: str, asked: Iterable[Any] | None, known: Sequence[Any]) -> list[Any]:
    """What was asked for, checked; everything if nothing was."""
    if asked is None:
        return list(known)
    chosen = list(dict.fromkeys(asked))
    for value in chosen:
        if value not in known:
            raise unknown(what, value, known)
    return chosen


def _listed_first(run: Run, what: str, found: Sequence[str]) -> list[str]:
    """In the experiment's order, then as they come."""
    listed = [x for x in getattr(run.experiment, what) if x in found]
    return listed + [x for x in found if x not in listed]


def _one(what: str, asked: str | None, known: Sequence[str]) -> str:
    """The one asked for, checked; else the first."""
    if asked is None:
        return known[0]
    if asked not in known:
        raise unknown(what, asked, known)
    return asked


def _per_head(choice: Choice, known: Sequence[int]) -> pl.Expr | None:
    if choice.heads is None:
        return None
    if isinstance(choice.heads, Mapping):
        _only("head", choice.heads.values(), known)
        return pl.any_horizontal(
            (pl.col("model") == m) & (pl.col("head") == h) for m, h in choice.heads.items()
        )
    return pl.col("head").is_in(_only("head", choice.heads, known))


def rows(
    run: Run,
    choice: Choice,
    measures: Sequence[str],
    needs: str,
    *,
    base_only: bool = False,
    fold: bool = False,
) -> Rows:
    """The chosen rows of `values`; `needs` says which experiment has them, if this one has not.

    `base_only` takes the base condition, unless others are asked for; `fold` turns several
    conditions into models of their own, so that they can stand beside each other.
    """
    lazy = run.values.filter(pl.col("measure").is_in(list(measures)))
    axes = ["model", "condition", "queries", "keys", "classes", "layer", "head", "item", "prompt"]
    known = lazy.select(axes).unique(maintain_order=True).collect()
    if known.is_empty():
        raise InputError(f"this run has no {' or '.join(measures)}; {needs}")

    def distinct(column: str) -> list[Any]:
        return known[column].drop_nulls().unique(maintain_order=True).to_list()

    models = _only("model", choice.models, models_in_order(run, distinct("model")))
    conditions = conditions_in_order(run, distinct("condition"))
    if choice.conditions is not None:
        conditions = _only("condition", choice.conditions, conditions)
    elif base_only:
        base = [c for c in conditions if c in base_conditions(run)]
        conditions = base[:1] or conditions[:1]
    layers = _only("layer", choice.layers, sorted(distinct("layer")))
    prompts = _only("prompt", choice.prompts, sorted(distinct("prompt")))
    queries = _one("queries", choice.queries, _listed_first(run, "queries", distinct("queries")))
    keys = _one("keys", choice.keys, _listed_first(run, "keys", distinct("keys")))
    sets = _listed_first(run, "classes", distinct("classes"))
    classes = _one("class set", choice.classes, sets) if sets else None
    if classes is not None:
        known = known.filter(pl.col("classes") == classes)
    named = run.environment.get("classes", {}).get(classes, {}).get("classes", [])
    present = distinct("item")
    in_order = [c for c in named if c in present] + [c for c in present if c not in named]
    items = _only("class", choice.items, in_order) if sets else []
    heads = _per_head(choice, sorted(distinct("head")))
    chosen = lazy.filter(
        pl.col("model").is_in(models),
        pl.col("condition").is_in(conditions),
        pl.col("layer").is_in(layers),
        pl.col("prompt").is_in(prompts),
        pl.col("queries") == queries,
        pl.col("keys") == keys,
    )
    if classes is not None:
        chosen = chosen.filter(pl.col("classes") == classes, pl.col("item").is_in(items))
    if heads is not None:
        chosen = chosen.filter(heads)
    frame = chosen.with_columns(pl.col("value").fill_nan(None)).collect()
    if frame.is_empty():
        raise InputError(
            "nothing is left of the run by this choice of models, conditions, layers, heads, "
            "prompts, queries and keys together; leave one of them out"
        )
    absent: list[str] = []
    if choice.items is None and "mass" in measures:
        tokens = dict(frame.group_by("item").agg(pl.col("tokens").max()).iter_rows())
        absent = [c for c in items if tokens.get(c) == 0]
        if len(absent) < len(items):
            items = [c for c in items if c not in absent]
            frame = frame.filter(pl.col("item").is_in(items))
    undefined = frame["value"].null_count()
    if undefined == frame.height:
        raise InputError(
            f"every chosen value of {' or '.join(measures)} is undefined (null or NaN): "
            "there is nothing to draw"
        )
    models = [m for m in models if m in set(frame["model"])]
    conditions = [c for c in conditions if c in set(frame["condition"])]
    labels = models
    if fold and len(conditions) > 1:
        labels = [f"{m}, {c}" if len(models) > 1 else c for m in models for c in conditions]
        label = (
            pl.format("{}, {}", "model", "condition") if len(models) > 1 else pl.col("condition")
        )
        frame = frame.with_columns(
            label.alias("model"), pl.lit(" + ".join(conditions)).alias("condition")
        )
        labels = [x for x in labels if x in set(frame["model"])]
    return Rows(
        frame=frame,
        models=labels,
        sources=models,
        conditions=conditions,
        layers=layers,
        items=items,
        absent=absent,
        queries=queries,
        keys=keys,
        classes=classes,
        not_numbers=undefined,
    )


def profiles(
    run: Run, choice: Choice, needs: str, *, panels: int | None = None, per_model: int | None = None
) -> tuple[pl.DataFrame, str, int]:
    """The chosen rows of `positions`, their queries, and how many heads the run has in all.

    Where no heads were asked for, the first `panels` in all or `per_model` of each are taken.
    """
    lazy = run.positions
    axes = ["model", "condition", "queries", "layer", "head", "prompt"]
    known = lazy.select(axes).unique(maintain_order=True).collect()
    if known.is_empty():
        raise InputError(f"this run has no profiles (positions); {needs}")

    def distinct(column: str) -> list[Any]:
        return known[column].drop_nulls().unique(maintain_order=True).to_list()

    models = _only("model", choice.models, models_in_order(run, distinct("model")))
    conditions = _only("condition", choice.conditions, conditions_in_order(run, known["condition"]))
    layers = _only("layer", choice.layers, sorted(distinct("layer")))
    prompts = _only("prompt", choice.prompts, sorted(distinct("prompt")))
    queries = _one("queries", choice.queries, _listed_first(run, "queries", distinct("queries")))
    heads = _per_head(choice, sorted(distinct("head")))
    kept = known.filter(
        pl.col("model").is_in(models),
        pl.col("condition").is_in(conditions),
        pl.col("layer").is_in(layers),
        pl.col("prompt").is_in(prompts),
        pl.col("queries") == queries,
        heads if heads is not None else True,
    )
    order = {m: i for i, m in enumerate(models)}
    pairs = (
        kept.select("model", "layer", "head")
        .unique()
        .with_columns(pl.col("model").replace_strict(order, return_dtype=pl.Int32).alias("rank"))
        .sort("rank", "layer", "head")
    )
    total = pairs.height
    if total == 0:
        raise InputError(
            "this choice of models, conditions, layers, heads, prompts and queries has no profile; "
            "leave one of them out"
        )
    if heads is None:
        if per_model is not None:
            pairs = pairs.group_by("rank", maintain_order=True).head(per_model)
        if panels is not None:
            pairs = pairs.head(panels)
    frame = (
        lazy.filter(
            pl.col("condition").is_in(conditions),
            pl.col("prompt").is_in(prompts),
            pl.col("queries") == queries,
        )
        .join(pairs.lazy(), on=["model", "layer", "head"])
        .with_columns(pl.col("average", "received").cast(pl.Float64).fill_nan(None))
        .sort("rank", "layer", "head", "prompt", "condition", "position")
        .drop("rank")
        .collect()
    )
    return frame, queries, total
