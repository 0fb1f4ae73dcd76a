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

NAMES = {"queries": "queries", "keys": "keys", "classes": "class set"}
"""Settings of which a figure shows one: column of the tables, and key of the experiment."""


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
            one = isinstance(value, str) and field.name not in NAMES
            if one or isinstance(value, int):
                object.__setattr__(self, field.name, (value,))
            elif value is not None and not isinstance(value, str) and len(value) == 0:
                raise InputError(
                    f"{field.name} is empty; leave it out to show everything",
                    code="empty-choice",
                    option=field.name,
                )


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The chosen rows of a table of numbers, and how they were measured."""

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
    queries: list[str]
    keys: list[str]
    classes: list[str]
    total: int
    """Number of layers before those that a figure does not show by default were left out."""

    def in_layers(self, layers: Sequence[int]) -> Selection:
        """The selection with only these layers."""
        frame = self.frame.filter(pl.col("layer").is_in(list(layers)))
        return replace(self, frame=frame, layers=list(layers))

    @property
    def undefined(self) -> int:
        """Number of rows with an undefined value (null or NaN); every mean skips them."""
        return self.frame["value"].null_count()


def models_in_order(run: Run, names: Iterable[str]) -> list[str]:
    """Models in the order of the experiment."""
    return in_order_of(run.experiment.models, names)


def conditions_in_order(run: Run, names: Iterable[str]) -> list[str]:
    """Base first, then the experiment's order."""
    return in_order_of((run.experiment.base, *run.experiment.variants), names)


def in_order_of(order: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names in this order; others follow in that of the alphabet."""
    present = set(names)
    listed = [name for name in order if name in present]
    return listed + sorted(present - set(listed))


def check_known(what: str, values: Iterable[Any] | None, known: Sequence[Any]) -> list[Any]:
    """The chosen values, checked against the known ones; all known values for None."""
    if values is None:
        return list(known)
    chosen = list(dict.fromkeys(values))
    for value in chosen:
        if value not in known:
            raise unknown(what, value, known)
    return chosen


def pick(run: Run, what: str, value: str | None, present: Iterable[str]) -> str:
    """The chosen value, checked; for None the first of the experiment that is present."""
    known = in_order_of(getattr(run.experiment, what), present)
    (chosen,) = check_known(NAMES[what], known[:1] if value is None else [value], known)
    return str(chosen)


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


def select(
    run: Run,
    choice: Choice,
    measures: Sequence[str],
    *,
    base_only: bool = False,
    table: pl.LazyFrame | None = None,
    all_of: str = "",
) -> Selection:
    """The chosen rows of `values`, or of another table of numbers.

    `base_only` selects the base condition by default. If several conditions are chosen, each is
    shown as a model of its own. `all_of` names a setting (queries or keys) of which all are
    selected by default, in place of the first.
    """
    lazy = (run.values if table is None else table).filter(pl.col("measure").is_in(list(measures)))
    columns = ["model", "condition", "layer", "head", *NAMES, "item"]
    known = _distinct(lazy.select(columns))
    if known.is_empty():
        raise AbsentError(f"this run has no {' or '.join(measures)}", missing=list(measures))
    axes, heads = _axes(run, choice, known, _distinct(lazy.select("prompt")))
    if base_only and choice.conditions is None:
        axes["condition"] = axes["condition"][:1]
    for name in NAMES:
        present, value = _values(known, name), getattr(choice, name)
        if name == all_of and value is None:
            axes[name] = in_order_of(getattr(run.experiment, name), present)
        elif present:
            axes[name] = [pick(run, name, value, present)]
    if choice.keys is None and all_of != "keys" and measures == ["mass"]:
        axes["keys"] = _default_keys(run, known, axes)
    sets, items = axes.get("classes", []), []
    if sets:
        items = _items(run, choice, known.filter(pl.col("classes").is_in(sets)), sets[0])
        axes["item"] = items
    kept = [*(pl.col(column).is_in(values) for column, values in axes.items()), *heads]
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
    models = [name for name in axes["model"] if name in set(frame["model"].unique())]
    conditions = [name for name in axes["condition"] if name in set(frame["condition"].unique())]
    selection = Selection(
        frame=frame,
        models=models,
        model_names=models,
        conditions=conditions,
        layers=axes["layer"],
        items=items,
        absent=absent,
        queries=axes["queries"],
        keys=axes["keys"],
        classes=sets,
        total=len(axes["layer"]),
    )
    return _conditions_as_models(selection) if base_only and len(conditions) > 1 else selection


def _axes(
    run: Run, choice: Choice, known: pl.DataFrame, prompts: pl.DataFrame
) -> tuple[dict[str, list[Any]], list[pl.Expr]]:
    """The chosen values of each axis, and a filter for the chosen heads."""
    axes = {
        "model": check_known("model", choice.models, models_in_order(run, _values(known, "model"))),
        "condition": check_known(
            "condition", choice.conditions, conditions_in_order(run, _values(known, "condition"))
        ),
        "layer": check_known("layer", choice.layers, sorted(_values(known, "layer"))),
        "prompt": check_known("prompt", choice.prompts, sorted(_values(prompts, "prompt"))),
    }
    if choice.heads is None:
        return axes, []
    by_model = choice.heads if isinstance(choice.heads, Mapping) else None
    numbers = choice.heads if by_model is None else by_model.values()
    heads = check_known("head", numbers, sorted(_values(known, "head")))
    if by_model is None:
        return axes, [pl.col("head").is_in(heads)]
    return axes, [
        pl.any_horizontal(
            (pl.col("model") == model) & (pl.col("head") == head)
            for model, head in by_model.items()
        )
    ]


def _values(known: pl.DataFrame, column: str) -> list[Any]:
    return known[column].drop_nulls().unique(maintain_order=True).to_list()


def _distinct(rows: pl.LazyFrame) -> pl.DataFrame:
    """The distinct rows; streamed, because the table may have millions of rows."""
    return rows.unique(maintain_order=True).collect(engine="streaming")


def _default_keys(run: Run, known: pl.DataFrame, axes: dict[str, list[Any]]) -> list[Any]:
    """The keys to show by default: not all keys if the class set has one class, whose mass on all
    keys is always 1, and the run has others."""
    of_set = known.filter(pl.col("classes").is_in(axes["classes"]))
    present = in_order_of(run.experiment.keys, _values(of_set, "keys"))
    others = [name for name in present if name != "all"]
    constant = axes["keys"] == ["all"] and of_set["item"].n_unique() == 1
    return others[:1] if constant and others else axes["keys"]


def _items(run: Run, choice: Choice, known: pl.DataFrame, classes: str) -> list[str]:
    """The chosen classes of the set, in the order of the set."""
    named = run.environment.get("classes", {}).get(classes, {}).get("classes", [])
    present = _values(known, "item")
    order = [c for c in named if c in present] + [c for c in present if c not in named]
    return check_known("class", choice.items, order)


def _conditions_as_models(selection: Selection) -> Selection:
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
