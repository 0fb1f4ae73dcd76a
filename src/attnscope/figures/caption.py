"""Writes the text of a figure: its declared words, and what follows from rows, shape and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from attnscope.figures.describe import FigureText
from attnscope.figures.select import Selection
from attnscope.figures.shapes.shape import FORMS
from attnscope.figures.text_format import BUNDLED, count, join, lower_first, upper_first
from attnscope.run.tables import ranges
from attnscope.stats.means import MINIMUM

if TYPE_CHECKING:
    from attnscope.figures.figure import Figure, Numbers, Request
    from attnscope.figures.shapes.shape import Shape
    from attnscope.run.store import Run

NAMED = 8
"""Up to so many models are named."""
HOLLOW = "Hollow points have no interval: too few prompts, or all values are equal"


def sentences(parts: Sequence[str]) -> str:
    """Joins the parts as sentences; empty parts are skipped."""
    return " ".join(f"{part.rstrip('.')}." for part in parts if part)


def figure_text(figure: Figure, numbers: Numbers, request: Request | None) -> FigureText:
    """The text of a figure."""
    data, shape = numbers.data, figure.shape_of(numbers)
    titles = [shape.y] if isinstance(shape.y, str) else [shape.y[m] for m in _panels(data, shape)]
    y = join([lower_first(title.partition(" (")[0]) for title in titles])
    filled = {"y": y, **numbers.words}
    several = [column for column in figure.by if data[column].n_unique() > 1]
    places = {column: FORMS.get(column, "{}") for column in several or figure.by}
    text = FigureText(
        title=upper_first(figure.title.format_map(filled)),
        what=upper_first(figure.what.format_map(filled)),
        small_print=_small_print(request, figure, numbers, shape),
        models=numbers.models if numbers.selection is None else numbers.selection.model_names,
        overview=shape.overview(data),
        axes=shape.axes(data),
        value=shape.value,
        quantity=figure.quantity.format_map(filled),
        places=places,
        order=shape.ranked(data),
        split=[column for column in shape.split if column in several],
        rule=shape.rule,
        notes=[*figure.notes(data), *numbers.notes],
    )
    if figure.differences not in ("models", "base"):
        text = replace(text, no_differences=figure.differences)
    return replace(text, **numbers.text)


def _panels(data: pl.DataFrame, shape: Shape) -> list[str]:
    return [name for name in shape.y if name in set(data[shape.panel])]


def _small_print(
    request: Request | None, figure: Figure, numbers: Numbers, shape: Shape
) -> list[str]:
    """What was read, further sentences, n and intervals, omissions."""
    selection, data = numbers.selection, numbers.data
    declared = [*figure.sentences, *numbers.sentences]
    if request is None:
        return declared
    models = numbers.models if selection is None else selection.model_names
    notes = [bundled_note(request.run, models), unfinished_note(request.run)]
    if selection is None:
        return [*declared, *notes]
    drawn, undefined, how = shape.interval(data), selection.undefined, figure.intervals
    return [
        f"{_scope(request, figure, selection)}; {settings_text(selection)}",
        *declared,
        prompts_text(request, data, how, interval=drawn is not None, drawn=drawn or ""),
        HOLLOW if shape.hollow(data) else "",
        f"No prompt contains a token of the class {join(selection.absent, 'or')}"
        if selection.absent
        else "",
        f"{undefined} undefined values{figure.undefined} are excluded" if undefined else "",
        *notes,
    ]


def _scope(request: Request, figure: Figure, selection: Selection) -> str:
    """Models, layers and how heads are combined."""
    every = len(request.run.experiment.models)
    names = selection.model_names
    models = join(names)
    if len(names) > NAMED:  # the steps of a training
        models = f"{len(names)} models, {names[0]} to {names[-1]}"
    if len(selection.model_names) < every:
        models += f" ({len(selection.model_names)} of {every} models)"
    parts = [models, layers_text(selection.layers, selection.total)]
    if figure.pooled:
        largest = request.options.get("combine") == "max"
        parts.append(f"{'largest value' if largest else 'mean'} over layers and all heads")
    elif figure.heads or "head" not in figure.by:
        parts.append(figure.heads or heads_text(request.run, request.combine, selection))
    return ", ".join(parts)


def bundled_note(run: Run, models: Sequence[str]) -> str:
    """The note on bundled models, which are tiny and trained by this project; empty if none."""
    known = run.environment.get("models", {})
    small = [m for m in models if known.get(m, {}).get("bundled")]
    if not small:
        return ""
    what = (
        BUNDLED if len(small) == 1 else BUNDLED.replace("model ", "models ").replace("one", "ones")
    )
    return f"{join(small)}: {what}"


def unfinished_note(run: Run) -> str:
    """The note on an unfinished run; empty if the run is complete."""
    if run.complete:
        return ""
    return (
        f"The run is not finished: these results use the {count(run.cells.height, 'cell')} so far"
    )


def layers_text(layers: Sequence[int], total: int | None = None) -> str:
    """`layers 0, 16, 20, 27 (counted from 0)`; adds the number in the run if it is larger."""
    word = "layer" if len(set(layers)) == 1 else "layers"
    some = f", of {total} in the run" if total is not None and len(layers) < total else ""
    return f"{word} {ranges(layers, 3)} (counted from 0){some}"


def heads_text(run: Run, combine: str, selection: Selection) -> str:
    """`mean over all heads`, `mean over heads 0, 1, 7 (of 8)` or `head 3`, from the rows."""
    heads = selection.frame["head"].drop_nulls().unique().sort().to_list()
    if not heads:
        return "one value per layer"
    if len(heads) == 1:
        return f"head {heads[0]} (counted from 0)"
    known = run.environment.get("models", {})
    sizes = {known.get(m, {}).get("heads") for m in selection.model_names} - {None}
    every = not sizes or len(heads) >= max(sizes)
    of = f" (of {join([str(s) for s in sorted(sizes)], 'or')})" if sizes else ""
    which = "all heads" if every else f"heads {ranges(heads, 3)}{of}"
    text = {"mean": "mean", "sum": "sum", "max": "maximum"}[combine] + f" over {which}"
    if run.experiment.combine == "each" and combine == "mean":
        text += " (`head-map` and `effect-heads` show each head)"
    return text


def settings_text(selection: Selection) -> str:
    """`queries: all; keys: all; class set: default; condition: base`."""
    parts = [f"queries: {', '.join(selection.queries)}", f"keys: {', '.join(selection.keys)}"]
    if "not-first" in selection.keys:
        parts[-1] += " (the first token is excluded; the other weights are not rescaled)"
    if selection.classes:
        parts.append(f"class set: {', '.join(selection.classes)}")
    if selection.conditions:
        parts.append(f"condition: {', '.join(selection.conditions)}")
    return "; ".join(parts)


def prompts_text(
    request: Request,
    frame: pl.DataFrame,
    how: str = "Student's t, corrected for skewness",
    *,
    interval: bool = False,
    drawn: str = "",
) -> str:
    """`n = 64 prompts`, and what the intervals are, or why there are none."""
    least, most = min(frame["n"]), max(frame["n"])
    n = f"n = {count(most, 'prompt')}" if least == most else f"n = {least} to {most} prompts"
    shown = list(request.choice.prompts or request.run.cells["prompt"].unique())
    n = f"{n} {request.units.describe(shown)}".rstrip()
    if min(most, request.units.count(shown)) < MINIMUM:
        return f"{n}; no confidence intervals (they need at least {MINIMUM} {request.unit_name})"
    if not interval:
        return n
    return f"{n}; 95 % confidence intervals over {request.unit_name}{drawn} ({how})"


def head_list_text(pairs: pl.DataFrame) -> str:
    """`A, layer 0, heads 0–2; B, layer 0, head 26 (counted from 0)`."""
    parts = []
    for (model, layer), part in pairs.group_by(["model", "layer"], maintain_order=True):
        word = "head" if part.height == 1 else "heads"
        parts.append(f"{model}, layer {layer}, {word} {ranges(part['head'].to_list(), 3)}")
    return f"{'; '.join(parts)} (counted from 0)"
