"""Reads the numbers of a figure: rows of a run, their means over prompts, differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.binning import PRINT
from attnscope.figures.figure import Figure, Numbers, Request
from attnscope.figures.numbers import between_models, differences, in_order, means, rounded
from attnscope.figures.quantities import quantity
from attnscope.figures.select import AbsentError, Selection, in_order_of, select
from attnscope.figures.text_format import join, upper_first
from attnscope.measures.measure import Range
from attnscope.run.tables import combine, normalise, possible

ITEMS = {"class": "item", "from": "item", "to": "target"}
"""Columns that the tables of a run name differently."""
SHOWS_VALUES = "The figure shows values; differences are not tested."
MODEL_AND_LAYER = pl.format("{}, layer {}", "model", "layer")
"""A panel for each model and layer."""
ACTIVATIONS = "MLP activations after the non-linearity (per layer, no heads)"
LAMBDA = (
    "λ: slope through the origin of the average attention weight with filler on that without, over "
    "aligned tokens"
)
LAMBDA_NEEDS = (
    "an experiment with `lambda` among its measures and a condition that inserts filler has the "
    "numbers, such as the recipe filler-profile"
)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a figure before the means, and what is written about them."""

    request: Request
    selection: Selection
    values: pl.DataFrame
    """The chosen rows, with heads combined unless the figure shows each head."""
    measures: Sequence[str]
    normalise: str
    within: Range | None = None
    """The possible values of the means; default: those of the measure."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, Any] = field(default_factory=dict)
    sentences: Sequence[str] = ()
    notes: Sequence[str] = ()
    text: Mapping[str, Any] = field(default_factory=dict)


def label(*columns: str) -> Callable[[pl.DataFrame], pl.Expr]:
    """A column that joins others: `label("model", "condition?")`. Those with a question mark are
    left out if they have only one value; of all, the last one stays."""

    def joined(values: pl.DataFrame) -> pl.Expr:
        names = [c for c in columns if c[-1] != "?" or values[c[:-1]].n_unique() > 1]
        return pl.concat_str([c.rstrip("?") for c in names or columns[-1:]], separator=", ")

    return joined


def means_of(request: Request, figure: Figure) -> Numbers:
    """The means over prompts of the figure's measures, by its columns."""
    rows = read(request, figure)
    return summarise(rows if figure.change is None else figure.change(rows), figure)


def read(request: Request, figure: Figure, measures: Sequence[str] = ()) -> Rows:
    """The chosen rows of the measures, by default those of the figure."""
    choice, of_heads = request.choice, "head" in figure.by
    if figure.one_model and choice.models is None:
        choice = replace(choice, models=[next(iter(request.run.experiment.models))])
    measures = measures or _measures(request, figure)
    selection = select(
        request.run,
        choice,
        measures,
        base_only=figure.base_only,
        table=getattr(request.run, figure.table),
        all_of=figure.all_of,
    )
    if choice.layers is None:
        selection = selection.in_layers(figure.layers(selection.layers))
    values = selection.frame
    if of_heads:
        values = values.filter(pl.col("head").is_not_null())
        if values.is_empty():
            raise InputError(
                f"{measures[0]} is one number per layer and has no values per head; choose another "
                "measure",
                code="no-heads",
                measure=measures[0],
            )
    elif not figure.pooled:
        values = combine(values, request.combine)
    how = request.normalise if "normalise" in figure.options else figure.normalise
    words = quantity(measures[0], how, _classes_text(selection))
    settings: dict[str, Any] = {}
    if "measure" in figure.options or "normalise" in figure.options:
        settings = {"y": upper_first(words["axis"])}
    if measures[0] == "mass" and how == "lift":
        settings |= {"rule": 1.0, "rule_means": "no preference"}
    return Rows(
        request=request,
        selection=selection,
        values=normalise(values, how),
        measures=[m for m in measures if m in set(selection.frame["measure"])],
        normalise=how,
        settings=settings,
        words=words,
    )


def _classes_text(selection: Selection) -> str:
    """`each token class`; or the class, if there is only one."""
    if len(selection.items) != 1:
        return "each token class"
    # The class set `whole` has one class, of all tokens: what matters are the keys.
    (item,), keys = selection.items, ", ".join(selection.keys)
    return f"the class {item}" if item != "all" else "all keys" if keys == "all" else f"keys {keys}"


def _measures(request: Request, figure: Figure) -> Sequence[str]:
    """The measures of the figure; with the option `measure` the chosen one, or the first of the
    preferred ones that the run has, or the first of any."""
    if "measure" not in figure.options:
        return figure.measures
    rows = getattr(request.run, figure.table).select("measure", pl.col("head").is_null())
    known = rows.unique().collect().sort("measure")
    chosen, by_head = request.options["measure"], known.filter(~pl.col("head"))["measure"]
    available = [m for m in figure.measures if m in set(known["measure"])] or by_head.to_list()
    if chosen is None and available:
        return available[:1]
    names = known["measure"].unique(maintain_order=True).to_list()
    if chosen not in names:
        missing = chosen or figure.measures[0]
        has = f" (it has {', '.join(names)})" if names else ""
        raise AbsentError(f"this run has no {missing}{has}", missing=[missing], known=names)
    return [str(chosen)]


def without_zeros(rows: Rows, column: str, drawn_as: str) -> Rows:
    """The rows without the classes in this column that receive exactly 0: they have no keys here.
    Classes that were chosen stay."""
    most = dict(rows.values.group_by(column).agg(pl.col("value").abs().max()).iter_rows())
    empty = [name for name, value in most.items() if name is not None and value == 0]
    if rows.request.choice.items is not None or not empty or len(empty) == len(most):
        return rows
    names = join(in_order_of(rows.selection.items, empty))
    return replace(
        rows,
        values=rows.values.filter(~pl.col(column).is_in(empty)),
        sentences=[*rows.sentences, f"No {drawn_as} for {names}: no attention goes there"],
    )


def summarise(rows: Rows, figure: Figure) -> Numbers:
    """Means by the columns of the figure, in the order of its shape, and the differences."""
    request, selection, measures = rows.request, rows.selection, rows.measures
    settings = {**_fields_of_shape(request, figure), **rows.settings}
    sentences = list(rows.sentences)
    by = [ITEMS.get(column, column) for column in figure.by]
    values = _with_columns(rows, figure, by)
    orders = _orders(rows, values, by)
    if figure.pooled:
        values, width = _binned(values, figure, request.run.experiment.bin)
        if width > 1:
            title = settings.get("x_title", figure.shape.x_title)
            settings["x_title"] = f"{title} (first of each bin of {width})"
            sentences.append(f"Each point is the mean over {width} positions")
        values = _per_prompt(values, by, request.options.get("combine") or "mean")
    heads = "mean" if "head" in by else request.combine
    parts = [values.filter(measure=m) for m in measures] if "measure" in by else [values]
    frame = pl.concat(
        means(part, by, request.units, rows.within or possible(measure, rows.normalise, heads))
        for part, measure in zip(parts, measures, strict=False)
    )
    if figure.also:
        further = values.group_by(by).agg(pl.col(*figure.also).mean())
        frame = frame.join(further, on=by, how="left", maintain_order="left")
    shape = replace(figure.shape, **settings)
    sort = [c for column in shape.order if (c := ITEMS.get(column, column)) in frame.columns]
    frame = in_order(frame, **{c: orders.get(c) or _natural(frame[c]) for c in sort})
    compared = _differences(rows, values, figure, {c: orders[c] for c in by if c in orders})
    named = {old: new for new, old in ITEMS.items() if new in figure.by}
    return Numbers(
        data=rounded(shape.arrange(frame.rename(named))),
        selection=selection,
        measures=measures,
        differences=None if compared is None else compared.rename(named, strict=False),
        settings=settings,
        words=rows.words,
        sentences=sentences,
        notes=rows.notes,
        text=rows.text,
    )


def _fields_of_shape(request: Request, figure: Figure) -> dict[str, Any]:
    """The options that are fields of the shape."""
    names = {f.name for f in fields(figure.shape)}
    return {name: value for name, value in request.options.items() if name in names}


def _with_columns(rows: Rows, figure: Figure, by: Sequence[str]) -> pl.DataFrame:
    """The values with `thing` (item or measure), derived columns, and metadata of prompts."""
    item = pl.coalesce("item", "measure") if "item" in rows.values.columns else pl.lit("")
    if rows.measures == ["flow"]:
        item = pl.format("{} → {}", "item", "target")
    values = rows.values.with_columns(item.alias("thing"), pl.col("value").cast(pl.Float64))
    for name, column in figure.derived.items():
        column = pl.col(column) if isinstance(column, str) else column
        values = values.with_columns((column(values) if callable(column) else column).alias(name))
    metadata = rows.request.run.prompts
    missing = [column for column in by if column not in values.columns]
    if missing and (metadata is None or not set(missing) <= set(metadata.columns)):
        raise AbsentError(
            f"the prompts of this run have no metadata columns {' and '.join(missing)}",
            missing=missing,
        )
    return values.join(metadata.select("prompt", *missing), on="prompt") if missing else values


def _orders(rows: Rows, values: pl.DataFrame, by: Sequence[str]) -> dict[str, list[Any]]:
    """The order of the names in each column: as in the experiment, and as in the class set."""
    selection = rows.selection
    known: dict[str, list[Any]] = {
        "model": selection.models,
        "condition": selection.conditions,
        "layer": selection.layers,
        "measure": list(rows.measures),
        "item": selection.items,
        "target": selection.items,
    }
    known = {c: order for c, order in known.items() if c in values.columns and order}
    places = in_order(values.select(*{*known, *by}).unique(maintain_order=True), **known)
    names = [c for c in by if c not in known and places.schema[c] == pl.String]
    derived = {c: places[c].unique(maintain_order=True).to_list() for c in names}
    return derived | {c: order for c, order in known.items() if c in by}


def _natural(values: pl.Series) -> list[Any]:
    return values.unique().sort().to_list()


def _per_prompt(values: pl.DataFrame, by: Sequence[str], how: str) -> pl.DataFrame:
    """One value per prompt: over layers, heads and all else."""
    together = pl.col("value").max() if how == "max" else pl.col("value").mean()
    return values.group_by(*by, "prompt", maintain_order=True).agg(together)


def _binned(values: pl.DataFrame, figure: Figure, step: int) -> tuple[pl.DataFrame, int]:
    """The rows with bins along `x`, and their width, so that a line has at most `PRINT` points.

    The bins of the run are `step` positions wide and are not divided.
    """
    x, step = figure.shape.x, step if figure.table == "by_query" else 1
    if values.schema[x].is_float() or values[x].n_unique() <= PRINT:
        return values, step
    first, last = values[x].min(), values[x].max()
    assert isinstance(first, int)
    assert isinstance(last, int)
    steps = -(-(last - first + 1) // step)
    width = step * -(-steps // PRINT)
    return values.with_columns((pl.col(x) - first) // width * width + first), width


def _differences(
    rows: Rows, values: pl.DataFrame, figure: Figure, orders: Mapping[str, Sequence[Any]]
) -> pl.DataFrame | None:
    """Differences of models at each place, or of the conditions from the base."""
    request, selection = rows.request, rows.selection
    if figure.differences == "models":
        places = {c: order for c, order in orders.items() if c != "model"}
        return between_models(values, selection.models, request.units, **places)
    base, conditions = request.run.experiment.base, selection.conditions
    pairs = [(c, base) for c in conditions if c != base and base in conditions]
    if figure.differences != "base" or not pairs:
        return None
    columns = ["model", "layer", *(["item"] if selection.items else [])]
    table = differences(selection.frame, "condition", pairs, columns, request.units)
    return table.with_columns(panel=MODEL_AND_LAYER)
