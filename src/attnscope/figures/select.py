"""Selects the rows of a run that a figure shows: models, layers, heads, prompts, queries, keys.

No number is changed. A choice that does not exist is an error that lists the existing ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import polars as pl

from attnscope.errors import InputError, unknown

if TYPE_CHECKING:
    from attnscope.run.store import Run


class AbsentError(InputError):
    """The run does not have these numbers; the figure adds which experiment has them."""

    code = "not-measured"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What to show. None: everything, or the first if only one can be shown."""

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
                raise InputError(
                    f"{field.name} is empty; leave it out to show everything",
                    code="empty-choice",
                    option=field.name,
                )


@dataclass(frozen=True, kw_only=True)
class ValueRows:
    """The chosen rows of `values`, and how they were measured."""

    frame: pl.DataFrame
    models: list[str]
    """Labels of the compared models; `model, condition` if conditions are shown as models."""
    model_names: list[str]
    """The models themselves."""
    conditions: list[str]
    layers: list[int]
    items: list[str]
    absent: list[str]
    """Classes of the set without a token in the shown prompts; not in `items`."""
    queries: str
    keys: str
    classes: str | None

    def restrict(
        self, *, layers: Sequence[int] | None = None, items: Sequence[str] | None = None
    ) -> ValueRows:
        """The selection with only these layers or classes."""
        frame = self.frame
        if layers is not None:
            frame = frame.filter(pl.col("layer").is_in(list(layers)))
        if items is not None:
            frame = frame.filter(pl.col("item").is_in(list(items)))
        return replace(
            self,
            frame=frame,
            layers=self.layers if layers is None else list(layers),
            items=self.items if items is None else list(items),
        )

    @property
    def undefined(self) -> int:
        """Number of rows with an undefined value (null or NaN); every mean skips them."""
        return self.frame["value"].null_count()


@dataclass(frozen=True, kw_only=True)
class ProfileRows:
    """The chosen rows of `positions`."""

    frame: pl.DataFrame
    models: list[str]
    prompts: list[int]
    queries: str
    total: int
    """Number of heads before the default limit."""


def models_in_order(run: Run, names: Iterable[str]) -> list[str]:
    """Models in the order of the experiment."""
    present = set(names)
    listed = [m for m in run.experiment.models if m in present]
    return listed + sorted(present - set(listed))


def conditions_in_order(run: Run, names: Iterable[str]) -> list[str]:
    """Base first, then the experiment's order."""
    present = set(names)
    listed = [c for c in (run.experiment.base, *run.experiment.variants) if c in present]
    return listed + sorted(present - set(listed))


def condition_fillers(run: Run) -> dict[str, str]:
    """By condition, what it inserts and where, without the length: `repeat '/', between`."""
    inserting = {n: c for n, c in run.experiment.conditions.items() if c.insert is not None}
    several = len({what.by for what in inserting.values()}) > 1
    fillers = {}
    for name, what in inserting.items():
        assert what.insert is not None
        unit = f" {what.insert.unit!r}" if what.insert.unit is not None else ""
        by = [f"by {what.by}"] if several else []
        fillers[name] = ", ".join([f"{what.insert.kind}{unit}", str(what.position), *by])
    return fillers


def check_known(what: str, values: Iterable[Any] | None, known: Sequence[Any]) -> list[Any]:
    """The chosen values, checked against the known ones; all known values for None."""
    if values is None:
        return list(known)
    chosen = list(dict.fromkeys(values))
    for value in chosen:
        if value not in known:
            raise unknown(what, value, known)
    return chosen


def pick(run: Run, what: str, value: str | None, present: Sequence[str]) -> str:
    """The chosen value, checked; for None the first of the experiment that is present."""
    first: list[str] = [x for x in getattr(run.experiment, what) if x in present]
    known = first + [x for x in present if x not in first]
    if value is None:
        return known[0]
    if value not in known:
        raise unknown("class set" if what == "classes" else what, value, known)
    return value


class _Axes:
    """The values of each axis of a table that a choice selects."""

    def __init__(
        self, run: Run, choice: Choice, known: pl.DataFrame, prompts: pl.DataFrame
    ) -> None:
        def values_of(column: str) -> list[Any]:
            return known[column].drop_nulls().unique(maintain_order=True).to_list()

        self.values_of = values_of
        self.models = check_known("model", choice.models, models_in_order(run, values_of("model")))
        every = conditions_in_order(run, values_of("condition"))
        self.conditions = check_known("condition", choice.conditions, every)
        self.layers = check_known("layer", choice.layers, sorted(values_of("layer")))
        self.prompts = check_known("prompt", choice.prompts, sorted(prompts["prompt"]))
        self.queries = pick(run, "queries", choice.queries, values_of("queries"))
        self.heads: pl.Expr | None = None
        if isinstance(choice.heads, Mapping):
            check_known("head", choice.heads.values(), sorted(values_of("head")))
            self.heads = pl.any_horizontal(
                (pl.col("model") == m) & (pl.col("head") == h) for m, h in choice.heads.items()
            )
        elif choice.heads is not None:
            self.heads = pl.col("head").is_in(
                check_known("head", choice.heads, sorted(values_of("head")))
            )

    def filters(self) -> list[pl.Expr]:
        """The filters that select the rows of the choice."""
        return [
            pl.col("model").is_in(self.models),
            pl.col("condition").is_in(self.conditions),
            pl.col("layer").is_in(self.layers),
            pl.col("prompt").is_in(self.prompts),
            pl.col("queries") == self.queries,
            *([self.heads] if self.heads is not None else []),
        ]


def select(
    run: Run,
    choice: Choice,
    measures: Sequence[str],
    *,
    base_only: bool = False,
    table: pl.LazyFrame | None = None,
) -> ValueRows:
    """The chosen rows of `values`, or of another table of numbers.

    `base_only` selects the base condition by default. If several conditions are chosen, each is
    shown as a model of its own.
    """
    lazy = (run.values if table is None else table).filter(pl.col("measure").is_in(list(measures)))
    columns = ["model", "condition", "queries", "keys", "classes", "layer", "head", "item"]
    known = _distinct(lazy.select(columns))
    if known.is_empty():
        raise AbsentError(f"this run has no {' or '.join(measures)}", missing=list(measures))
    axes = _Axes(run, choice, known, _distinct(lazy.select("prompt")))
    if base_only and choice.conditions is None:
        axes.conditions = axes.conditions[:1]
    keys = pick(run, "keys", choice.keys, axes.values_of("keys"))
    sets = axes.values_of("classes")
    classes = pick(run, "classes", choice.classes, sets) if sets else None
    kept = [*axes.filters(), pl.col("keys") == keys]
    items: list[str] = []
    if classes is not None:
        items = _items(run, choice, known, classes)
        kept += [pl.col("classes") == classes, pl.col("item").is_in(items)]
    frame = lazy.filter(kept).with_columns(pl.col("value").fill_nan(None)).collect()
    if frame.is_empty():
        raise InputError(
            "no row has this combination of models, conditions, layers, heads, prompts, queries "
            "and keys; leave one of them out",
            code="empty-selection",
        )
    absent: list[str] = []
    if choice.items is None and "mass" in measures:
        absent = without_tokens(frame, items)
        items = [c for c in items if c not in absent]
        frame = frame.filter(pl.col("item").is_in(items))
    if frame["value"].null_count() == frame.height:
        raise InputError(
            f"every chosen value of {' or '.join(measures)} is undefined (null or NaN), so there "
            "is nothing to draw; choose other layers, prompts or classes",
            code="all-undefined",
            measures=list(measures),
        )
    selection = ValueRows(
        frame=frame,
        models=_present(axes.models, frame["model"]),
        model_names=_present(axes.models, frame["model"]),
        conditions=_present(axes.conditions, frame["condition"]),
        layers=axes.layers,
        items=items,
        absent=absent,
        queries=axes.queries,
        keys=keys,
        classes=classes,
    )
    return (
        _conditions_as_models(selection)
        if base_only and len(selection.conditions) > 1
        else selection
    )


def _distinct(rows: pl.LazyFrame) -> pl.DataFrame:
    """The distinct rows; streamed, because the table may have millions of rows."""
    return rows.unique(maintain_order=True).collect(engine="streaming")


def _present(names: Sequence[str], values: pl.Series) -> list[str]:
    """The names that occur in the values, in their order."""
    present = set(values.unique())
    return [name for name in names if name in present]


def _items(run: Run, choice: Choice, known: pl.DataFrame, classes: str) -> list[str]:
    """The chosen classes of the set, in the order of the set."""
    of_set = known.filter(pl.col("classes") == classes)["item"].drop_nulls()
    present = of_set.unique(maintain_order=True).to_list()
    named = run.environment.get("classes", {}).get(classes, {}).get("classes", [])
    order = [c for c in named if c in present] + [c for c in present if c not in named]
    return check_known("class", choice.items, order)


def thin(layers: Sequence[int], most: int) -> list[int]:
    """At most `most` layers, equally spaced from the first to the last."""
    if len(layers) <= most:
        return list(layers)
    return sorted({layers[round(i * (len(layers) - 1) / (most - 1))] for i in range(most)})


def without_tokens(frame: pl.DataFrame, items: Sequence[str]) -> list[str]:
    """Classes without a token in these rows; empty if no class would be left."""
    tokens = dict(frame.group_by("item").agg(pl.col("tokens").max()).iter_rows())
    absent = [c for c in items if tokens.get(c) == 0]
    return absent if len(absent) < len(items) else []


def _conditions_as_models(selection: ValueRows) -> ValueRows:
    """The selection with each condition as a model of its own."""
    models, conditions = selection.models, selection.conditions
    several = len(models) > 1
    label = pl.format("{}, {}", "model", "condition") if several else pl.col("condition")
    frame = selection.frame.with_columns(
        label.alias("model"), pl.lit(" + ".join(conditions)).alias("condition")
    )
    labels = [f"{m}, {c}" if several else c for m in models for c in conditions]
    present = set(frame["model"])
    return replace(selection, frame=frame, models=[x for x in labels if x in present])


def select_profiles(
    run: Run, choice: Choice, *, panels: int | None = None, per_model: int | None = None
) -> ProfileRows:
    """The chosen rows of `positions`.

    By default the first `panels` heads in all, or the first `per_model` heads of each model.
    """
    columns = ["model", "condition", "queries", "layer", "head", "prompt"]
    known = run.positions.select(columns).unique(maintain_order=True).collect()
    if known.is_empty():
        raise AbsentError("this run has no profile", missing=["profile"])
    axes = _Axes(run, choice, known, known)
    pairs = known.filter(axes.filters()).select("model", "layer", "head").unique()
    order = {m: i for i, m in enumerate(axes.models)}
    rank = pl.col("model").replace_strict(order, return_dtype=pl.Int32).alias("rank")
    pairs = pairs.with_columns(rank).sort("rank", "layer", "head")
    total = pairs.height
    if total == 0:
        raise InputError(
            "no profile has this combination of models, conditions, layers, heads, prompts and "
            "queries; leave one of them out",
            code="empty-selection",
        )
    if axes.heads is None:
        if per_model is not None:
            pairs = pairs.group_by("rank", maintain_order=True).head(per_model)
        if panels is not None:
            pairs = pairs.head(panels)
    frame = (
        run.positions.filter(
            pl.col("condition").is_in(axes.conditions),
            pl.col("prompt").is_in(axes.prompts),
            pl.col("queries") == axes.queries,
        )
        .join(pairs.lazy(), on=["model", "layer", "head"])
        .with_columns(pl.col("average", "received").cast(pl.Float64).fill_nan(None))
        .sort("rank", "layer", "head", "prompt", "condition", "position")
        .drop("rank")
        .collect()
    )
    return ProfileRows(
        frame=frame,
        models=frame["model"].unique(maintain_order=True).to_list(),
        prompts=sorted(frame["prompt"].unique().to_list()),
        queries=axes.queries,
        total=total,
    )
