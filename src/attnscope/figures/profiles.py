"""Selects and bins profiles, and writes the text that figures of profiles share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from attnscope.figures.binning import FINE, PRINT, binned
from attnscope.figures.caption import head_list_text
from attnscope.figures.charts.profile import Y_TITLE
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import FigureNumbers, Option, Request
from attnscope.figures.numbers import in_order, rounded
from attnscope.figures.select import ProfileRows, pick, select_profiles
from attnscope.figures.text_format import count

HEAD_COLUMNS = ["model", "layer", "head"]
KEYS = [*HEAD_COLUMNS, "panel", "series", "position"]
LEAVE_OUT_FIRST = Option(help="`leave_out_first`: hide the first token", known=(False, True))
OPTIONS = {
    "mean": Option(
        help="`mean`: mean over prompts; default: the first prompt", known=(False, True)
    ),
    "leave_out_first": LEAVE_OUT_FIRST,
    "count_from": Option(help="`count_from`: 0 (default) or 1", known=(0, 1)),
}


@dataclass(frozen=True, kw_only=True)
class ProfileContext:
    """How the rows of the two panels per head were selected and binned."""

    selection: ProfileRows
    full: pl.DataFrame
    """Before binning."""
    conditions: Sequence[str]
    bins: tuple[int, int]
    """Tokens per bin in print and on the screen."""
    heads: pl.DataFrame
    """Model, layer and head of each column of panels."""


def rows_of(
    request: Request, conditions: Sequence[str], **some: int
) -> tuple[ProfileRows, pl.DataFrame]:
    """The profiles of two conditions with their tokens: of one prompt, or of all for a mean."""
    selection = select_profiles(request.run, replace(request.choice, conditions=conditions), **some)
    token_columns = ["model", "prompt", "condition", "position"]
    tokens = request.run.tokens.filter(
        pl.col("condition").is_in(conditions), pl.col("model").is_in(selection.models)
    )
    known = tokens.select(
        *token_columns, "role", "aligned_position", pl.col("text").alias("token")
    ).collect()
    rows = selection.frame.join(known, on=token_columns, how="left").rename({"average": "value"})
    if not request.options["mean"]:
        rows = rows.filter(pl.col("prompt") == selection.prompts[0])
    return selection, rows


def panels_of(
    request: Request,
    selection: ProfileRows,
    rows: Mapping[str, pl.DataFrame],
    conditions: Sequence[str],
    series: Sequence[str],
    **settings: Any,
) -> FigureNumbers[ProfileContext]:
    """The numbers of a figure from the rows of its two panels (with `series` and `position`)."""
    named = [part.with_columns(pl.lit(panel).alias("panel")) for panel, part in rows.items()]
    both = pl.concat([part.select(*KEYS, "role", "token", "value") for part in named])
    if request.options["mean"]:
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
    heads = frame.select(HEAD_COLUMNS).unique(maintain_order=True)
    return FigureNumbers(
        data=frame,
        fine=fine,
        settings={"count_from": request.options["count_from"], **settings},
        width=780 if heads.height > 1 else 620,
        margin=40,
        context=ProfileContext(
            selection=selection,
            full=both,
            conditions=conditions,
            bins=(coarse, narrow),
            heads=heads,
        ),
    )


def _binned(
    full: pl.DataFrame, limit: int, panels: Sequence[str], series: Sequence[str]
) -> tuple[pl.DataFrame, int]:
    # By role too, so that no bin mixes filler with text.
    by = [*KEYS[:-1], "role"]
    parts = [binned(full.filter(pl.col("panel") == panel), limit, by=by) for panel in panels]
    frame = rounded(pl.concat([part for part, _ in parts]))
    heads = frame.select(HEAD_COLUMNS).unique(maintain_order=True).with_row_index("place")
    frame = frame.join(heads, on=HEAD_COLUMNS, maintain_order="left").sort(
        "position", maintain_order=True
    )
    frame = in_order(frame, place=range(heads.height), panel=panels, series=series)
    columns = [*KEYS, "last", "role", "token", "value", "min", "max", "tokens", "n"]
    return frame.select(columns), max(width for _, width in parts)


def profile_text(
    numbers: FigureNumbers[ProfileContext],
    request: Request,
    *,
    see: str,
    about: str,
    more: str = "",
    **fields: Any,
) -> FigureText:
    """The text of a figure of profiles.

    `see` opens the caption, `about` names the conditions, `more` is a further sentence.
    """
    context, selection, options = numbers.context, numbers.context.selection, request.options
    many, shown_heads = len(selection.prompts), context.heads.height
    if options["mean"]:
        n = f"Mean over n = {count(many, 'prompt')} at each index (fewer where a prompt is shorter)"
    else:
        of = f" of {many} in the run" if many > 1 else ", the only one"
        n = f"n = 1: prompt {selection.prompts[0]}{of}"
    coarse, fine = context.bins
    return FigureText(
        caption=[
            see,
            head_list_text(context.heads, options["count_from"]),
            f"{Y_TITLE}: mean over the later queries that can see the token; queries: "
            f"{selection.queries}; raw values; {about}",
            n,
            more,
            "The first token is not shown" if options["leave_out_first"] else "",
            f"{shown_heads} of {selection.total} heads are shown"
            if shown_heads < selection.total
            else "",
            f"Static version: bins of {coarse} tokens, line: mean, band: minimum to maximum"
            if coarse > 1
            else "",
            f"Interactive version: bins of {fine} tokens" if fine > 1 else "",
        ],
        models=selection.models,
        quantity="average attention weight",
        places={"model": "{}", "layer": "layer {}", "head": "head {}", "panel": "{}"}
        | {"series": "{}", "position": "position {}"},
        split=[*HEAD_COLUMNS, "panel", "series"],
        **fields,
    )


def measure_of_heads(
    request: Request, context: ProfileContext, measure: str, conditions: Sequence[str]
) -> tuple[pl.DataFrame, str] | None:
    """A measure of the drawn heads and queries over all prompts, and a note on its keys.

    None if the run does not have the measure.
    """
    values = (
        request.run.values.filter(
            pl.col("measure") == measure,
            pl.col("condition").is_in(conditions),
            pl.col("queries") == context.selection.queries,
        )
        .join(context.heads.lazy(), on=HEAD_COLUMNS, how="semi")
        .with_columns(pl.col("value").fill_nan(None))
        .collect()
    )
    if values["value"].drop_nulls().is_empty():
        return None
    present = values["keys"].unique(maintain_order=True).to_list()
    keys = pick(request.run, "keys", request.choice.keys, present)
    return values.filter(pl.col("keys") == keys), f" (keys: {keys})" if len(present) > 1 else ""
