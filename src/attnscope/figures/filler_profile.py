"""Draws the attention that original tokens receive without and with filler.

Drawn from `positions` and `tokens`.
"""

from typing import Any

import polars as pl

from attnscope.errors import InputError, unknown
from attnscope.figures.charts.profile import Y_TITLE, profile_pairs
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Request
from attnscope.figures.numbers import means, rounded
from attnscope.figures.profiles import (
    HEAD_COLUMNS,
    OPTIONS,
    ProfileContext,
    measure_of_heads,
    panels_of,
    profile_text,
    rows_of,
)
from attnscope.figures.select import AbsentError, conditions_in_order
from attnscope.figures.text_format import count, number
from attnscope.figures.theme import Style

WITHOUT, WITH = "without filler", "with filler"
ORIGINAL, WHOLE = "original tokens", "whole sequence"


def _chart(frame: pl.DataFrame, style: Style, *, count_from: int = 0) -> Any:
    """Per head the original tokens above, the whole sequence below.

    Columns: those of `profile_pairs`; `panel` is "original tokens" or "whole sequence", `series`
    "without filler" or "with filler".
    """
    return profile_pairs(
        frame,
        style,
        colours={WITHOUT: style.theme.without, WITH: style.theme.filled},
        panels={
            ORIGINAL: "original token (filler cut out)",
            WHOLE: "token of the whole sequence",
        },
        span="filler ({})",
        count_from=count_from,
    )


def _numbers(request: Request) -> FigureNumbers[ProfileContext]:
    base, variant = _conditions(request)
    selection, rows = rows_of(request, [base, variant], panels=3)
    is_base = pl.col("condition") == base
    rows = rows.with_columns(
        pl.when(is_base).then(pl.lit(WITHOUT)).otherwise(pl.lit(WITH)).alias("series")
    )
    # A base token is drawn if a token of the variant is aligned with it. Boundary tokens are not.
    of_token = ["model", "prompt", "layer", "head", "aligned_position"]
    aligned = (
        rows.filter(~is_base & pl.col("aligned_position").is_not_null()).select(of_token).unique()
    )
    original = rows.filter(pl.col("aligned_position").is_not_null()).join(
        aligned, on=of_token, how="semi"
    )
    original = original.with_columns(pl.col("aligned_position").alias("position"))
    both = {ORIGINAL: original, WHOLE: rows.filter(~is_base)}
    if request.options["leave_out_first"]:
        both = {panel: part.filter(pl.col("position") > 0) for panel, part in both.items()}
    if original.is_empty():
        raise InputError(
            f"no token of {variant!r} has an aligned position in {base!r}; choose another "
            "condition",
            code="nothing-aligned",
            condition=variant,
        )
    return panels_of(request, selection, both, [base, variant], [WITHOUT, WITH])


def _conditions(request: Request) -> tuple[str, str]:
    """The base, and the chosen variant or the first."""
    names = conditions_in_order(request.run, request.run.cells["condition"].unique())
    base = request.run.experiment.base
    variants = [c for c in names if c != base]
    if base not in names or not variants:
        raise AbsentError(
            f"this run has no pair of base and variant (conditions: {', '.join(names)})",
            code="nothing-to-compare",
            conditions=names,
        )
    if request.choice.conditions is None:
        return base, variants[0]
    chosen = [c for c in request.choice.conditions if c != base]
    for name in chosen:
        if name not in variants:
            raise unknown("condition", name, names)
    if len(chosen) != 1:
        raise InputError(
            f"filler-profile shows one variant, not {len(chosen)}; choose one of "
            f"{', '.join(variants)}",
            code="number-of-conditions",
            conditions=chosen,
            known=variants,
        )
    return base, chosen[0]


def _text(numbers: FigureNumbers[ProfileContext], request: Request) -> FigureText:
    (base, variant), data, theme = numbers.context.conditions, numbers.data, request.theme
    heads = count(numbers.context.heads.height, "head")
    over = "λ over all prompts is under Notes if the run has it."

    def series_numbers(panel: str) -> str:
        part = data.filter(pl.col("panel") == panel)
        return f"from {number(part['position'].min())} to {number(part['last'].max())}"

    return profile_text(
        numbers,
        request,
        see="Lines are the average attention weight that each original token receives, without "
        "and with "
        "filler",
        about=f"{variant} against {base}",
        title="Attention with and without filler",
        overview=f"Line charts, two panels for each of {heads}: above, the original tokens without "
        "and with filler, indices aligned; below, the whole sequence with filler, its span shaded.",
        axes=[
            f"x, above: index of the original token, {series_numbers(ORIGINAL)}",
            f"x, below: index in the sequence with filler, {series_numbers(WHOLE)}",
            f"y: {Y_TITLE}, from {number(data['min'].min())} to {number(data['max'].max())}",
        ],
        legend=[
            f"{WITHOUT} ({base}): {theme.without}",
            f"{WITH} ({variant}): {theme.filled}",
            f"shaded: the inserted tokens: {theme.span}",
        ],
        notes=[*_falls(numbers, request), *_lambdas(numbers, request)],
        no_differences=f"Differences per token are not tested; {over}"
        if request.options["mean"]
        else f"Differences are not tested on one prompt; {over}",
    )


def _head(row: dict[str, Any], request: Request) -> str:
    start = request.options["count_from"]
    return f"{row['model']}, layer {row['layer'] + start}, head {row['head'] + start}"


def _falls(numbers: FigureNumbers[ProfileContext], request: Request) -> list[str]:
    """The number of aligned positions at which the line with filler is lower."""
    wide = numbers.data.filter(pl.col("panel") == ORIGINAL).pivot(
        on="series", index=[*HEAD_COLUMNS, "position"], values="value"
    )
    notes = []
    for group in wide.drop_nulls().partition_by(HEAD_COLUMNS, maintain_order=True):
        lower = group.filter(pl.col(WITH) < pl.col(WITHOUT)).height
        notes.append(
            f"{_head(group.row(0, named=True), request)}: lower with filler at {lower} of "
            f"{group.height} aligned positions."
        )
    return notes


def _lambdas(numbers: FigureNumbers[ProfileContext], request: Request) -> list[str]:
    """λ of the shown heads over all prompts, if the run has it."""
    lambdas = measure_of_heads(request, numbers.context, "lambda", numbers.context.conditions[1:])
    if lambdas is None:
        return []
    notes = []
    for row in rounded(means(lambdas[0], HEAD_COLUMNS, request.units)).iter_rows(named=True):
        where = f"{_head(row, request)}: λ{lambdas[1]} = {number(row['value'])}"
        if row["low"] is None:
            notes.append(f"{where} (no interval, n = {row['n']}).")
            continue
        side = "below 1" if row["high"] < 1 else "above 1" if row["low"] > 1 else "around 1"
        notes.append(
            f"{where} (95 % interval {number(row['low'])} to {number(row['high'])}, {side}; "
            f"n = {row['n']})."
        )
    return notes


FIGURE = Figure(
    name="filler-profile",
    shows="per head: original tokens without and with filler, aligned; the full sequence with the "
    "filler shaded",
    needs="an experiment with `profile` among its measures and a condition that inserts filler has "
    "them, such as the recipe filler-profile",
    numbers=_numbers,
    chart=_chart,
    text=_text,
    height=140,
    options=OPTIONS,
    claims=("fall", "one-factor"),
)
