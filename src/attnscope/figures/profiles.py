"""What figures of profiles share: rows with their tokens, bins, the measures told beside them.

This module must not know any single figure, nor how an average is measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from attnscope.figures.binning import FINE, PRINT, binned
from attnscope.figures.caption import pairs_said
from attnscope.figures.charts.profile import Y_TITLE
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import FigureNumbers, Option, Request
from attnscope.figures.numbers import in_order, shown
from attnscope.figures.select import ProfileRows, one, select_profiles
from attnscope.figures.text_format import count

PLACE = ["model", "layer", "head"]
KEYS = [*PLACE, "panel", "series", "position"]
LEAVE_OUT_FIRST = Option(said="`leave_out_first`", known=(False, True))
OPTIONS = {
    "mean": Option(said="`mean` (over prompts, in place of the first)", known=(False, True)),
    "leave_out_first": LEAVE_OUT_FIRST,
    "count_from": Option(said="`count_from` 1", known=(0, 1)),
}


@dataclass(frozen=True, kw_only=True)
class Panels:
    """How the rows of two panels per head came about."""

    found: ProfileRows
    full: pl.DataFrame
    """Before binning."""
    conditions: Sequence[str]
    bins: tuple[int, int]
    """Tokens in a bin: in print, and on the screen."""
    heads: pl.DataFrame
    """Model, layer and head of every column of panels."""


def rows_of(
    asked: Request, conditions: Sequence[str], **some: int
) -> tuple[ProfileRows, pl.DataFrame]:
    """The profiles of two conditions with the tokens they are of; of one prompt, unless a mean
    over all is asked for.
    """
    found = select_profiles(asked.run, replace(asked.choice, conditions=conditions), **some)
    place = ["model", "prompt", "condition", "position"]
    tokens = asked.run.tokens.filter(
        pl.col("condition").is_in(conditions), pl.col("model").is_in(found.models)
    )
    known = tokens.select(
        *place, "role", "aligned_position", pl.col("text").alias("token")
    ).collect()
    rows = found.frame.join(known, on=place, how="left").rename({"average": "value"})
    if not asked.options["mean"]:
        rows = rows.filter(pl.col("prompt") == found.prompts[0])
    return found, rows


def panels_of(
    asked: Request,
    found: ProfileRows,
    rows: Mapping[str, pl.DataFrame],
    conditions: Sequence[str],
    series: Sequence[str],
    **settings: Any,
) -> FigureNumbers[Panels]:
    """The figure's numbers from the rows of its two panels, which have `series` and `position`."""
    named = [part.with_columns(pl.lit(panel).alias("panel")) for panel, part in rows.items()]
    both = pl.concat([part.select(*KEYS, "role", "token", "value") for part in named])
    if asked.options["mean"]:
        both = both.group_by(KEYS, maintain_order=True).agg(
            pl.col("role").mode().sort().first(),
            pl.lit(None, pl.String).alias("token"),
            pl.col("value").mean(),
            pl.col("value").count().cast(pl.Int64).alias("n"),
        )
    else:
        both = both.with_columns(pl.lit(1, pl.Int64).alias("n"))
    frame, coarse = _binned(both, PRINT, list(rows), series)
    fine, narrow = _binned(both, FINE, list(rows), series)
    heads = frame.select(PLACE).unique(maintain_order=True)
    return FigureNumbers(
        data=frame,
        fine=fine,
        settings={"count_from": asked.options["count_from"], **settings},
        width=780 if heads.height > 1 else 620,
        margin=40,
        told=Panels(
            found=found, full=both, conditions=conditions, bins=(coarse, narrow), heads=heads
        ),
    )


def _binned(
    full: pl.DataFrame, limit: int, panels: Sequence[str], series: Sequence[str]
) -> tuple[pl.DataFrame, int]:
    # By role too, so that no bin mixes filler with text.
    by = [*KEYS[:-1], "role"]
    parts = [binned(full.filter(pl.col("panel") == panel), limit, by=by) for panel in panels]
    frame = shown(pl.concat([part for part, _ in parts]))
    heads = frame.select(PLACE).unique(maintain_order=True).with_row_index("place")
    frame = frame.join(heads, on=PLACE, maintain_order="left").sort("position", maintain_order=True)
    frame = in_order(frame, place=range(heads.height), panel=panels, series=series)
    columns = [*KEYS, "last", "role", "token", "value", "min", "max", "tokens", "n"]
    return frame.select(columns), max(width for _, width in parts)


def profile_words(
    made: FigureNumbers[Panels], asked: Request, *, about: str, more: str = "", **said: Any
) -> FigureText:
    """What such figures say alike; the caption is `about` these conditions, and says `more`."""
    told, found, options = made.told, made.told.found, asked.options
    many, shown_heads = len(found.prompts), told.heads.height
    if options["mean"]:
        n = f"Mean over n = {count(many, 'prompt')} at each index (fewer where a prompt is shorter)"
    else:
        of = f" of {many} in the run" if many > 1 else ", the only one"
        n = f"n = 1: prompt {found.prompts[0]}{of}"
    coarse, fine = told.bins
    return FigureText(
        caption=[
            pairs_said(told.heads, options["count_from"]),
            f"{Y_TITLE}: mean over the later queries that see the token; queries: "
            f"{found.queries}; not normalised further; {about}",
            n,
            more,
            "First token left out" if options["leave_out_first"] else "",
            f"{shown_heads} of {found.total} heads are shown" if shown_heads < found.total else "",
            f"Static version: bins of {coarse} tokens, line: mean, band: minimum to maximum"
            if coarse > 1
            else "",
            f"Interactive version: bins of {fine} tokens" if fine > 1 else "",
        ],
        models=found.models,
        quantity="average attention weight",
        places={"model": "{}", "layer": "layer {}", "head": "head {}", "panel": "{}"}
        | {"series": "{}", "position": "position {}"},
        split=[*PLACE, "panel", "series"],
        **said,
    )


def beside(
    asked: Request, told: Panels, measure: str, conditions: Sequence[str]
) -> tuple[pl.DataFrame, str] | None:
    """A measure of the heads drawn, over all prompts, where the run has it for the queries drawn;
    and which keys it is of, where there are several.
    """
    values = (
        asked.run.values.filter(
            pl.col("measure") == measure,
            pl.col("condition").is_in(conditions),
            pl.col("queries") == told.found.queries,
        )
        .join(told.heads.lazy(), on=PLACE, how="semi")
        .with_columns(pl.col("value").fill_nan(None))
        .collect()
    )
    if values["value"].drop_nulls().is_empty():
        return None
    there = values["keys"].unique(maintain_order=True).to_list()
    keys = one(asked.run, "keys", asked.choice.keys, there)
    return values.filter(pl.col("keys") == keys), f" (keys: {keys})" if len(there) > 1 else ""
