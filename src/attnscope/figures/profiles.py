"""Reads profiles: attention per token of single heads, under two conditions, binned for print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.binning import FINE, PRINT, binned
from attnscope.figures.caption import head_list_text
from attnscope.figures.figure import Numbers, Request
from attnscope.figures.numbers import in_order, rounded
from attnscope.figures.options import LEAVE_OUT_FIRST, Option
from attnscope.figures.select import (
    AbsentError,
    Selection,
    check_known,
    conditions_in_order,
    pick,
    select,
)
from attnscope.figures.shapes.profile import HEAD_COLUMNS
from attnscope.figures.text_format import count, number

KEYS = [*HEAD_COLUMNS, "panel", "series", "position"]
OPTIONS = {
    "mean": Option(help="mean over prompts; default: the first prompt", known=(False, True)),
    **LEAVE_OUT_FIRST,
}


def chosen_conditions(request: Request, default: Sequence[str], number_of: int) -> list[str]:
    """So many conditions besides the base: the chosen ones, or by default these."""
    base = request.run.experiment.base
    names = conditions_in_order(request.run, request.run.cells["condition"].unique())
    if request.choice.conditions is None and len(default) < number_of:
        raise AbsentError(
            f"this run does not have the conditions (it has {', '.join(names)})",
            code="nothing-to-compare",
            conditions=names,
        )
    chosen = check_known("condition", request.choice.conditions or default, names)
    chosen = [name for name in chosen if name != base]
    if len(chosen) != number_of:
        variants = [name for name in names if name != base]
        raise InputError(
            f"the figure shows {number_of} of the conditions {', '.join(variants)}, not "
            f"{len(chosen)}; choose them with conditions",
            code="number-of-conditions",
            conditions=chosen,
            known=variants,
        )
    return chosen


def select_profiles(
    request: Request,
    conditions: Sequence[str] | None = None,
    value: str = "average",
    all_of: str = "",
) -> tuple[Selection, pl.DataFrame]:
    """The chosen rows of `positions` with their tokens, and the heads, in the order of models."""
    columns = {"keys": pl.lit("all"), "classes": None, "item": None, "measure": pl.lit("profile")}
    table = request.run.positions.with_columns(
        *(
            pl.lit(None, pl.String).alias(n) if e is None else e.alias(n)
            for n, e in columns.items()
        ),
        pl.col(value).cast(pl.Float64).alias("value"),
    )
    choice = replace(request.choice, conditions=conditions or request.choice.conditions, keys=None)
    selection = select(request.run, choice, ["profile"], table=table, all_of=all_of)
    of_token = ["model", "prompt", "condition", "position"]
    tokens = request.run.tokens.filter(pl.col("model").is_in(selection.models))
    tokens = tokens.select(*of_token, "role", "class", "aligned_position", token="text")
    rows = selection.frame.join(tokens.collect(), on=of_token, how="left")
    rows = in_order(rows.sort("layer", "head", "prompt", "position"), model=selection.models)
    selection = replace(selection, frame=rows)
    return selection, rows.select(HEAD_COLUMNS).unique(maintain_order=True)


def profile_numbers(
    request: Request,
    heads: tuple[pl.DataFrame, int],
    selection: Selection,
    panels: Mapping[str, pl.DataFrame],
    about: str,
) -> Numbers:
    """The numbers of two panels per head: of the first prompt, or means over prompts.

    `heads` are those drawn, and the number of all; `panels` have the rows of each panel, with
    `series` and `position`; `about` names the conditions.
    """
    shown, total = heads
    prompts = selection.frame["prompt"].unique().sort().to_list()
    if request.options["mean"]:
        n = f"Mean over n = {count(len(prompts), 'prompt')} at each index (fewer where a prompt is "
        n += "shorter)"
    else:
        n = f"n = 1: prompt {prompts[0]} of {len(prompts)} in the run"
    (data, coarse), (fine, narrow) = (
        _binned(request, shown, panels, prompts[0], limit) for limit in (PRINT, FINE)
    )
    return Numbers(
        data=data,
        fine=fine,
        models=selection.models,
        measures=["lambda", "spikes", "uniformity"],
        sentences=[
            head_list_text(shown),
            "Average attention weight: mean over the later queries that can see the token; "
            f"queries: {selection.queries[0]}; {about}",
            n,
            "The first token is not shown" if request.options["leave_out_first"] else "",
            f"{shown.height} of {total} heads are shown" if shown.height < total else "",
            f"Static version: bins of {coarse} tokens, line: mean, band: minimum to maximum"
            if coarse > 1
            else "",
            f"Interactive version: bins of {narrow} tokens" if narrow > 1 else "",
        ],
        notes=_variation(data, next(iter(panels))),
    )


def _binned(
    request: Request,
    heads: pl.DataFrame,
    panels: Mapping[str, pl.DataFrame],
    prompt: int,
    limit: int,
) -> tuple[pl.DataFrame, int]:
    """The rows of all panels in at most `limit` bins each, and the tokens per bin."""
    parts, widths = [], []
    for panel, rows in panels.items():
        rows = rows.join(heads, on=HEAD_COLUMNS, how="semi").with_columns(panel=pl.lit(panel))
        if request.options["leave_out_first"]:
            rows = rows.filter(pl.col("prompt_position") > 0)
        if request.options["mean"]:
            rows = rows.group_by(KEYS, maintain_order=True).agg(
                pl.col("role").mode().sort().first(),
                pl.lit(None, pl.String).alias("token"),
                pl.col("value").mean(),
                pl.col("value").count().cast(pl.Int64).alias("n"),
            )
        else:
            rows = rows.filter(prompt=prompt).with_columns(n=pl.lit(1, pl.Int64))
        rows = rows.select(*KEYS, "role", "token", "value", "n")
        # By role too, so that no bin mixes filler with text.
        part, width = binned(rows, limit, by=[*KEYS[:-1], "role"])
        parts.append(part)
        widths.append(width)
    frame = rounded(pl.concat(parts))
    series = frame["series"].unique(maintain_order=True).to_list()
    frame = frame.join(heads.with_row_index("place"), on=HEAD_COLUMNS, maintain_order="left")
    frame = frame.sort("position", maintain_order=True)
    frame = in_order(frame, place=range(heads.height), panel=list(panels), series=series)
    columns = [*KEYS, "last", "role", "token", "value", "min", "max", "tokens", "n"]
    return frame.select(columns), max(widths)


def _variation(data: pl.DataFrame, panel: str) -> list[str]:
    """Mean and coefficient of variation of each line of the upper panel."""
    value = pl.col("value")
    lines = data.filter(panel=panel).group_by(*HEAD_COLUMNS, "series", maintain_order=True)
    table = lines.agg(
        mean=value.mean(), variation=value.std(ddof=0) / value.mean(), places=value.count()
    )
    return [
        f"{row['model']}, layer {row['layer']}, head {row['head']}, {row['series']}: mean "
        f"{number(row['mean'])} over {row['places']} places, coefficient of variation "
        f"{number(row['variation'])}."
        for row in rounded(table).iter_rows(named=True)
    ]


def measure_of_heads(
    request: Request, heads: pl.DataFrame, selection: Selection, measure: str
) -> tuple[pl.DataFrame, str]:
    """A measure of the drawn heads and queries over all prompts, and a note on its keys; no rows if
    the run does not have the measure."""
    values = (
        request.run.values.filter(
            pl.col("measure") == measure,
            pl.col("condition").is_in(selection.conditions),
            pl.col("queries").is_in(selection.queries),
        )
        .join(heads.lazy(), on=HEAD_COLUMNS, how="semi")
        .filter(pl.col("value").is_not_nan())
        .collect()
    )
    present = values["keys"].unique(maintain_order=True).to_list()
    if not present:
        return values, ""
    keys = pick(request.run, "keys", request.choice.keys, present)
    return values.filter(pl.col("keys") == keys), f" (keys: {keys})" if len(present) > 1 else ""
