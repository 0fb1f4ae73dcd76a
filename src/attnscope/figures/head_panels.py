"""What figures of single heads share: the rows of any measure that has heads, their means.

This module must not know any single figure, nor how anything is measured.
"""

from dataclasses import dataclass, replace

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.caption import layers_said, left_out, measured, prompts_said
from attnscope.figures.figure import FigureNumbers, Option, Request
from attnscope.figures.numbers import in_order, means, shown
from attnscope.figures.select import AbsentError, ValueRows, select
from attnscope.figures.text_format import join
from attnscope.figures.token_types import PREFERRED
from attnscope.stats.tables import possible

MEASURE = Option(said="`measure` (else mass, or entropy)")


@dataclass(frozen=True, kw_only=True)
class OfHeads:
    """A value of every head, in a panel for each model and class."""

    found: ValueRows
    measure: str
    """In words."""
    panels: list[str]


def of_heads(asked: Request, *, base_only: bool = False) -> tuple[ValueRows, str]:
    """The rows of the measure asked for, which has heads; else of mass, else of entropy."""
    there = asked.run.values.select(pl.col("measure").unique()).collect()["measure"]
    known = there.sort().to_list()
    measure = asked.options["measure"] or ("mass" if "mass" in known else "entropy")
    if measure not in known:
        wanted = asked.options["measure"] or "mass"
        raise AbsentError(
            f"this run has no {wanted} (it has {', '.join(known)})", missing=[wanted], known=known
        )
    found = select(asked.run, asked.choice, [measure], base_only=base_only)
    if found.frame["head"].is_null().all():
        raise InputError(
            f"{measure} is one number per layer and has no values per head; choose another measure",
            code="no-heads",
            measure=measure,
        )
    return found, measure


def means_of_heads(asked: Request) -> FigureNumbers[OfHeads]:
    """The mean over prompts in every head: of the first model, unless others are asked for, and of
    the base, unless conditions are.
    """
    choice = asked.choice
    if choice.models is None:
        first = next(iter(asked.run.experiment.models))
        asked = replace(asked, choice=replace(choice, models=[first]))
    found, measure = of_heads(asked, base_only=True)
    if choice.items is None and set(PREFERRED) <= set(found.items):
        found = found.only(items=PREFERRED)
    values = found.frame.filter(pl.col("head").is_not_null())
    named = [pl.col("model")] if len(found.models) > 1 else []
    if found.items:
        of = pl.format("{} → {}", "item", "target")
        named.append(pl.when(pl.col("target").is_null()).then(pl.col("item")).otherwise(of))
    panel = pl.concat_str(named, separator=", ") if named else pl.lit(measure)
    values = values.with_columns(panel.alias("panel"))
    orders = {"model": found.models, **({"item": found.items} if found.items else {})}
    panels = in_order(values, **orders)["panel"].unique(maintain_order=True).to_list()
    frame = means(values, ["panel", "layer", "head"], asked.sources, possible(measure)).sort(
        "layer", "head"
    )
    frame = shown(in_order(frame, panel=panels))
    told = OfHeads(found=found, measure=measure.replace("_", " "), panels=panels)
    return FigureNumbers(measures=[measure], data=frame, told=told, margin=40)


def heads_caption(made: FigureNumbers[OfHeads], asked: Request, *, interval: bool) -> list[str]:
    """What captions of such figures say alike."""
    found, every = made.told.found, len(asked.run.experiment.models)
    some = f"; {len(found.sources)} of {every} models" if len(found.sources) < every else ""
    return [
        f"{join(found.sources)}{some}, {layers_said(found.layers)}, every head by itself",
        f"{made.told.measure}, not normalised further; {measured(found)}",
        prompts_said(asked, made.data, interval=interval),
        *left_out(found),
    ]
