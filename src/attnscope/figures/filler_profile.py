"""What filler does to a head's attention: the original tokens without and with it, and the whole.

Drawn from `positions` and `tokens`. This module must not know how an average is measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import altair as alt
import polars as pl

from attnscope.errors import InputError, unknown
from attnscope.figures.assemble import assemble
from attnscope.figures.binning import FINE, PRINT, binned
from attnscope.figures.caption import caption, pairs_said
from attnscope.figures.choice import Choice, base_conditions, conditions_in_order, profiles
from attnscope.figures.describe import Words
from attnscope.figures.figure import Figure, Run
from attnscope.figures.layout import columns_for
from attnscope.figures.numbers import means, shown
from attnscope.figures.profile import lines_panel, span_of
from attnscope.figures.style import Style
from attnscope.figures.theme import PUBLISHED, Theme
from attnscope.figures.words import count, number

__all__ = ["NEEDS", "draw", "filler_profile"]

NEEDS = (
    "an experiment with `profile` among its measures and a condition that inserts filler has them, "
    "such as the recipe filler-profile"
)
WITHOUT, WITH = "without filler", "with filler"
ORIGINAL, WHOLE = "original tokens", "whole sequence"
Y_TITLE = "Average attention weight"


def filler_profile(
    frame: pl.DataFrame,
    *,
    theme: Theme = PUBLISHED,
    width: float = 760,
    height: float = 140,
    count_from: int = 0,
    interactive: bool = False,
) -> Any:
    """The chart of `frame`: per head the original tokens above, the whole sequence below.

    Columns: `model`, `layer`, `head`, `panel` ("original tokens" or "whole sequence"), `series`
    ("without filler" or "with filler"), `position`, `last`, `value`, `min`, `max`, `role`.
    """
    groups = frame.partition_by(["model", "layer", "head"], maintain_order=True)
    columns = columns_for(len(groups))
    wide = width / columns - (14 if columns > 1 else 0)
    colours = {WITHOUT: theme.without, WITH: theme.filled}
    bins = bool((frame["position"] != frame["last"]).any())
    cells = []
    for i, group in enumerate(groups):
        row = group.row(0, named=True)
        named = f"layer {row['layer'] + count_from}, head {row['head'] + count_from}"
        above = group.filter(pl.col("panel") == ORIGINAL)
        below = group.filter(pl.col("panel") == WHOLE)
        span = span_of(below)
        label = []
        if span is not None:
            tokens = below.filter(pl.col("role") == "filler")["tokens"].sum()
            label = [(*span, f"filler ({tokens:,})")]
        left = i % columns == 0
        shared: dict[str, Any] = {
            "width": wide,
            "height": height,
            "y_title": Y_TITLE if left else "",
            "binned": bins,
            "theme": theme,
        }
        cells.append(
            alt.vconcat(
                lines_panel(
                    above,
                    colours,
                    x_title="original token (filler cut out)",
                    title=[row["model"], named],
                    zoom=f"zoom_{i}" if interactive else None,
                    **shared,
                ),
                lines_panel(
                    below,
                    colours,
                    x_title="token of the whole sequence",
                    spans=label,
                    brush=f"brush_{i}" if interactive else None,
                    **shared,
                ),
                spacing=22,
            )
        )
    return alt.concat(*cells, columns=columns, spacing={"row": 34, "column": 22}).resolve_scale(
        color="shared"
    )


def numbers(
    positions: pl.DataFrame, tokens: pl.DataFrame, base: str, variant: str, prompt: int | None
) -> pl.DataFrame:
    """Both panels' rows, unbinned; of one prompt, or the mean over prompts at each index."""
    place = ["model", "prompt", "condition", "position"]
    known = tokens.select(*place, "role", "twin", "text")
    rows = positions.join(known, on=place, how="left").rename({"average": "value"})
    named = rows.with_columns(
        pl.when(pl.col("condition") == base)
        .then(pl.lit(WITHOUT))
        .otherwise(pl.lit(WITH))
        .alias("series")
    )
    # A base token takes part when its twin is in the variant: seams are left out on both sides.
    twins = named.filter((pl.col("condition") == variant) & pl.col("twin").is_not_null())
    pairs = twins.select("model", "prompt", "layer", "head", "twin").unique()
    original = named.filter(pl.col("twin").is_not_null()).join(
        pairs, on=["model", "prompt", "layer", "head", "twin"], how="semi"
    )
    original = original.with_columns(
        pl.col("twin").alias("position"), pl.lit(ORIGINAL).alias("panel")
    )
    whole = named.filter(pl.col("condition") == variant).with_columns(pl.lit(WHOLE).alias("panel"))
    columns = ["model", "layer", "head", "panel", "series", "position", "role", "text", "value"]
    both = pl.concat([original.select("prompt", *columns), whole.select("prompt", *columns)])
    if prompt is not None:
        one = both.filter(pl.col("prompt") == prompt).drop("prompt").rename({"text": "token"})
        return one.with_columns(pl.lit(1, pl.Int64).alias("n"))
    by = ["model", "layer", "head", "panel", "series", "position"]
    return (
        both.group_by(by, maintain_order=True)
        .agg(
            pl.col("role").mode().sort().first(),
            pl.lit(None, pl.String).alias("token"),
            pl.col("value").mean(),
            pl.col("value").count().cast(pl.Int64).alias("n"),
        )
        .select(*by, "role", "token", "value", "n")
        .sort(by, maintain_order=True)
    )


def draw(
    run: Run,
    choice: Choice,
    style: Style,
    *,
    mean: bool = False,
    leave_out_first: bool = False,
    count_from: int = 0,
) -> Figure:
    """The figure of a run: of its first prompt, or, with `mean`, of the mean over all prompts.

    `leave_out_first` drops the first token, which soaks up attention in many models; `count_from`
    1 repeats the labels of papers that count layers and heads from one.
    """
    if count_from not in (0, 1):
        raise unknown("count_from", count_from, (0, 1))
    base, variant = _conditions(run, choice)
    found, queries, total = profiles(
        run, replace(choice, conditions=[base, variant]), NEEDS, panels=3
    )
    prompts = sorted(found["prompt"].unique().to_list())
    prompt = None if mean else prompts[0]
    models = found["model"].unique(maintain_order=True).to_list()
    tokens = run.tokens.filter(
        pl.col("condition").is_in([base, variant]), pl.col("model").is_in(models)
    ).collect()
    full = numbers(found, tokens, base, variant, prompt)
    if leave_out_first:
        full = full.filter(pl.col("position") > 0)
    if full.is_empty():
        raise InputError(f"no token of {variant!r} has a twin in {base!r}: nothing can be aligned")
    frame, width_of_bin = _binned(full, PRINT)
    fine, fine_bin = _binned(full, FINE)
    pairs = frame.select("model", "layer", "head").unique(maintain_order=True)
    title = style.title or "Attention with and without filler"
    named = pairs_said(pairs, count_from)
    many = found["prompt"].n_unique()
    notes = [
        named,
        f"{Y_TITLE}: mean over the later queries that see the token; queries: {queries}; "
        f"not normalised further; {variant} against {base}",
        f"Mean over n = {count(many, 'prompt')} at each index (fewer where a prompt is shorter)"
        if mean
        else f"n = 1: prompt {prompt} of {many} in the run"
        if many > 1
        else f"n = 1: prompt {prompt}, the only one",
        "First token left out" if leave_out_first else "",
        f"{pairs.height} of {total} heads are shown" if pairs.height < total else "",
        f"Static version: bins of {width_of_bin} tokens, line: mean, band: minimum to maximum"
        if width_of_bin > 1
        else "",
        f"Interactive version: bins of {fine_bin} tokens" if fine_bin > 1 else "",
    ]
    said = caption(run, notes, models)
    statements = [*_falls(frame, count_from), *_lambdas(run, pairs, variant, count_from)]
    words = Words(
        title=title,
        overview=f"Line charts, two panels for each of {count(pairs.height, 'head')}: above, the "
        "original tokens without and with filler, indices aligned; below, the whole sequence with "
        "filler, its span shaded.",
        axes=[
            f"x, above: index of the original token, {_range(frame, ORIGINAL)}",
            f"x, below: index in the sequence with filler, {_range(frame, WHOLE)}",
            f"y: {Y_TITLE}, from {number(frame['min'].min())} to {number(frame['max'].max())}",
        ],
        legend=[
            f"{WITHOUT} ({base}): {style.theme.without}",
            f"{WITH} ({variant}): {style.theme.filled}",
            f"shaded: the inserted tokens: {style.theme.span}",
        ],
        value="value",
        quantity="average attention weight",
        places={
            "model": "{}",
            "layer": "layer {}",
            "head": "head {}",
            "panel": "{}",
            "series": "{}",
            "position": "position {}",
        },
        split=["model", "layer", "head", "panel", "series"],
        notes=statements,
        no_differences="One prompt cannot show which differences hold up; λ over all prompts is "
        "under Notes where it was measured."
        if not mean
        else "Differences per token are not tested; λ over all prompts is under Notes where it was "
        "measured.",
    )
    width = style.width or 780
    sizes: dict[str, Any] = {
        "theme": style.theme,
        "width": width if pairs.height > 1 else min(width, 620),
        "height": style.height or 140,
        "count_from": count_from,
    }
    return assemble(
        "filler-profile",
        lambda: filler_profile(frame, **sizes),
        frame,
        words,
        caption=said,
        style=style,
        width=sizes["width"] + 40,
        interactive=lambda: filler_profile(fine, interactive=True, **sizes),
    )


def _conditions(run: Run, choice: Choice) -> tuple[str, str]:
    """The base, and the variant asked for or else the first."""
    names = conditions_in_order(run, run.cells["condition"].unique())
    bases = [c for c in names if c in base_conditions(run)]
    variants = [c for c in names if c not in bases]
    if not bases or not variants:
        raise InputError(
            f"this run has no pair of base and variant (conditions: {', '.join(names)}); {NEEDS}"
        )
    if choice.conditions is None:
        return bases[0], variants[0]
    asked = [c for c in choice.conditions if c not in bases]
    for name in asked:
        if name not in variants:
            raise unknown("condition", name, names)
    if len(asked) != 1:
        raise InputError(f"filler-profile shows one variant; choose one of {', '.join(variants)}")
    return bases[0], asked[0]


def _binned(full: pl.DataFrame, limit: int) -> tuple[pl.DataFrame, int]:
    by = ["model", "layer", "head", "panel", "series", "role"]
    parts, widest = [], 1
    for panel in (ORIGINAL, WHOLE):
        # By role too, so that no bin mixes filler with text.
        part = full.filter(pl.col("panel") == panel)
        made, width = binned(part, limit, by=by)
        parts.append(made)
        widest = max(widest, width)
    keys = ["model", "layer", "head", "panel", "series", "position"]
    together = shown(pl.concat(parts))
    order = together.select("model", "layer", "head").unique(maintain_order=True).with_row_index()
    together = together.join(order, on=["model", "layer", "head"]).sort(
        "index", "panel", pl.col("series") == WITH, "position"
    )
    columns = [*keys, "last", "role", "token", "value", "min", "max", "tokens", "n"]
    return together.select(columns), widest


def _range(frame: pl.DataFrame, panel: str) -> str:
    part = frame.filter(pl.col("panel") == panel)
    return f"from {number(part['position'].min())} to {number(part['last'].max())}"


def _falls(frame: pl.DataFrame, count_from: int) -> list[str]:
    """At how many of the shown places the line with filler is lower."""
    wide = frame.filter(pl.col("panel") == ORIGINAL).pivot(
        on="series", index=["model", "layer", "head", "position"], values="value"
    )
    said: list[str] = []
    if not {WITHOUT, WITH} <= set(wide.columns):
        return said
    wide = wide.drop_nulls()
    for group in wide.partition_by(["model", "layer", "head"], maintain_order=True):
        row = group.row(0, named=True)
        lower = group.filter(pl.col(WITH) < pl.col(WITHOUT)).height
        said.append(
            f"{row['model']}, layer {row['layer'] + count_from}, head {row['head'] + count_from}: "
            f"lower with filler at {lower} of {group.height} aligned places."
        )
    return said


def _lambdas(run: Run, pairs: pl.DataFrame, variant: str, count_from: int) -> list[str]:
    """λ of the shown heads over all prompts, where the run has it."""
    values = (
        run.values.filter(pl.col("measure") == "lambda", pl.col("condition") == variant)
        .join(pairs.lazy(), on=["model", "layer", "head"], how="semi")
        .with_columns(pl.col("value").fill_nan(None))
        .collect()
    )
    if values.is_empty():
        return []
    values = values.filter(
        pl.col("queries") == values["queries"].first(), pl.col("keys") == values["keys"].first()
    )
    if values["value"].drop_nulls().is_empty():
        return []
    said = []
    for row in shown(means(values, ["model", "layer", "head"])).iter_rows(named=True):
        where = (
            f"{row['model']}, layer {row['layer'] + count_from}, head {row['head'] + count_from}: "
            f"λ = {number(row['value'])}"
        )
        if row["low"] is None:
            said.append(f"{where} (no interval, n = {row['n']}).")
            continue
        held = "holds up" if row["high"] < 1 or row["low"] > 1 else "does not hold up"
        way = "fall" if row["value"] < 1 else "rise"
        said.append(
            f"{where} (95 % interval {number(row['low'])} to {number(row['high'])}, "
            f"n = {row['n']}): the {way} {held}."
        )
    return said
