"""Selects and averages values per head for the figures of heads."""

from dataclasses import dataclass, replace

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.caption import layers_text, omissions, prompts_text, settings_text
from attnscope.figures.figure import FigureNumbers, Option, Request
from attnscope.figures.numbers import in_order, means, rounded
from attnscope.figures.select import AbsentError, ValueRows, select
from attnscope.figures.text_format import join
from attnscope.figures.token_types import PREFERRED
from attnscope.stats.tables import possible

MEASURE = Option(help="`measure`: name of a measure; default: mass, else entropy")


@dataclass(frozen=True, kw_only=True)
class HeadContext:
    """How values per head were selected; a panel for each model and class."""

    selection: ValueRows
    measure: str
    """Name of the measure, with spaces."""
    panels: list[str]


def select_heads(request: Request, *, base_only: bool = False) -> tuple[ValueRows, str]:
    """The rows of the chosen measure, or of mass, or of entropy."""
    measures = request.run.values.select(pl.col("measure").unique()).collect()["measure"]
    known = measures.sort().to_list()
    measure = request.options["measure"] or ("mass" if "mass" in known else "entropy")
    if measure not in known:
        required = request.options["measure"] or "mass"
        raise AbsentError(
            f"this run has no {required} (it has {', '.join(known)})",
            missing=[required],
            known=known,
        )
    selection = select(request.run, request.choice, [measure], base_only=base_only)
    if selection.frame["head"].is_null().all():
        raise InputError(
            f"{measure} is one number per layer and has no values per head; choose another measure",
            code="no-heads",
            measure=measure,
        )
    return selection, measure


def head_means(request: Request) -> FigureNumbers[HeadContext]:
    """The mean over prompts in each head; by default of the first model and the base."""
    choice = request.choice
    if choice.models is None:
        first = next(iter(request.run.experiment.models))
        request = replace(request, choice=replace(choice, models=[first]))
    selection, measure = select_heads(request, base_only=True)
    if choice.items is None and set(PREFERRED) <= set(selection.items):
        selection = selection.restrict(items=PREFERRED)
    values = selection.frame.filter(pl.col("head").is_not_null())
    named = [pl.col("model")] if len(selection.models) > 1 else []
    if selection.items:
        of = pl.format("{} → {}", "item", "target")
        named.append(pl.when(pl.col("target").is_null()).then(pl.col("item")).otherwise(of))
    panel = pl.concat_str(named, separator=", ") if named else pl.lit(measure)
    values = values.with_columns(panel.alias("panel"))
    orders = {"model": selection.models, **({"item": selection.items} if selection.items else {})}
    panels = in_order(values, **orders)["panel"].unique(maintain_order=True).to_list()
    frame = means(values, ["panel", "layer", "head"], request.units, possible(measure)).sort(
        "layer", "head"
    )
    frame = rounded(in_order(frame, panel=panels))
    context = HeadContext(selection=selection, measure=measure.replace("_", " "), panels=panels)
    return FigureNumbers(measures=[measure], data=frame, context=context, margin=40)


def heads_caption(
    numbers: FigureNumbers[HeadContext], request: Request, *, see: str, interval: bool
) -> list[str]:
    """The caption of a figure of heads; `see` opens it."""
    selection, every = numbers.context.selection, len(request.run.experiment.models)
    some = (
        f"; {len(selection.model_names)} of {every} models"
        if len(selection.model_names) < every
        else ""
    )
    return [
        f"{see}: {numbers.context.measure}, mean over prompts",
        f"{join(selection.model_names)}{some}, {layers_text(selection.layers)}; raw values; "
        f"{settings_text(selection)}",
        prompts_text(request, numbers.data, interval=interval),
        *omissions(selection),
    ]
