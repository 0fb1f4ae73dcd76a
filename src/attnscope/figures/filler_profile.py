"""What filler does to a head's attention: the original tokens without and with it, and the whole.

Drawn from `positions` and `tokens`. This module must not know how an average is measured.
"""

from typing import Any

import polars as pl

from attnscope.errors import InputError, unknown
from attnscope.figures.charts.profile import Y_TITLE, profile_pairs
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Request
from attnscope.figures.numbers import means, shown
from attnscope.figures.profiles import (
    OPTIONS,
    PLACE,
    Panels,
    beside,
    panels_of,
    profile_words,
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


def _numbers(asked: Request) -> FigureNumbers[Panels]:
    base, variant = _conditions(asked)
    found, rows = rows_of(asked, [base, variant], panels=3)
    is_base = pl.col("condition") == base
    rows = rows.with_columns(
        pl.when(is_base).then(pl.lit(WITHOUT)).otherwise(pl.lit(WITH)).alias("series")
    )
    # A base token takes part when its twin is in the variant: seams are left out on both sides.
    of_token = ["model", "prompt", "layer", "head", "aligned_position"]
    twins = (
        rows.filter(~is_base & pl.col("aligned_position").is_not_null()).select(of_token).unique()
    )
    original = rows.filter(pl.col("aligned_position").is_not_null()).join(
        twins, on=of_token, how="semi"
    )
    original = original.with_columns(pl.col("aligned_position").alias("position"))
    both = {ORIGINAL: original, WHOLE: rows.filter(~is_base)}
    if asked.options["leave_out_first"]:
        both = {panel: part.filter(pl.col("position") > 0) for panel, part in both.items()}
    if original.is_empty():
        raise InputError(
            f"no token of {variant!r} has an aligned position in {base!r}; choose another "
            "condition",
            code="nothing-aligned",
            condition=variant,
        )
    return panels_of(asked, found, both, [base, variant], [WITHOUT, WITH])


def _conditions(asked: Request) -> tuple[str, str]:
    """The base, and the variant asked for or else the first."""
    names = conditions_in_order(asked.run, asked.run.cells["condition"].unique())
    base = asked.run.experiment.base
    variants = [c for c in names if c != base]
    if base not in names or not variants:
        raise AbsentError(
            f"this run has no pair of base and variant (conditions: {', '.join(names)})",
            code="nothing-to-compare",
            conditions=names,
        )
    if asked.choice.conditions is None:
        return base, variants[0]
    wanted = [c for c in asked.choice.conditions if c != base]
    for name in wanted:
        if name not in variants:
            raise unknown("condition", name, names)
    if len(wanted) != 1:
        raise InputError(
            f"filler-profile shows one variant, not {len(wanted)}; choose one of "
            f"{', '.join(variants)}",
            code="number-of-conditions",
            conditions=wanted,
            known=variants,
        )
    return base, wanted[0]


def _words(made: FigureNumbers[Panels], asked: Request) -> FigureText:
    (base, variant), data, theme = made.told.conditions, made.data, asked.theme
    heads = count(made.told.heads.height, "head")
    over = "λ over all prompts is under Notes where it was measured."

    def along(panel: str) -> str:
        part = data.filter(pl.col("panel") == panel)
        return f"from {number(part['position'].min())} to {number(part['last'].max())}"

    return profile_words(
        made,
        asked,
        about=f"{variant} against {base}",
        title="Attention with and without filler",
        overview=f"Line charts, two panels for each of {heads}: above, the original tokens without "
        "and with filler, indices aligned; below, the whole sequence with filler, its span shaded.",
        axes=[
            f"x, above: index of the original token, {along(ORIGINAL)}",
            f"x, below: index in the sequence with filler, {along(WHOLE)}",
            f"y: {Y_TITLE}, from {number(data['min'].min())} to {number(data['max'].max())}",
        ],
        legend=[
            f"{WITHOUT} ({base}): {theme.without}",
            f"{WITH} ({variant}): {theme.filled}",
            f"shaded: the inserted tokens: {theme.span}",
        ],
        notes=[*_falls(made, asked), *_lambdas(made, asked)],
        no_differences=f"Differences per token are not tested; {over}"
        if asked.options["mean"]
        else f"One prompt cannot show which differences hold up; {over}",
    )


def _head(row: dict[str, Any], asked: Request) -> str:
    start = asked.options["count_from"]
    return f"{row['model']}, layer {row['layer'] + start}, head {row['head'] + start}"


def _falls(made: FigureNumbers[Panels], asked: Request) -> list[str]:
    """At how many of the shown places the line with filler is lower."""
    wide = made.data.filter(pl.col("panel") == ORIGINAL).pivot(
        on="series", index=[*PLACE, "position"], values="value"
    )
    said = []
    for group in wide.drop_nulls().partition_by(PLACE, maintain_order=True):
        lower = group.filter(pl.col(WITH) < pl.col(WITHOUT)).height
        said.append(
            f"{_head(group.row(0, named=True), asked)}: lower with filler at {lower} of "
            f"{group.height} aligned places."
        )
    return said


def _lambdas(made: FigureNumbers[Panels], asked: Request) -> list[str]:
    """λ of the shown heads over all prompts, where the run has it."""
    found = beside(asked, made.told, "lambda", made.told.conditions[1:])
    if found is None:
        return []
    said = []
    for row in shown(means(found[0], PLACE, asked.sources)).iter_rows(named=True):
        where = f"{_head(row, asked)}: λ{found[1]} = {number(row['value'])}"
        if row["low"] is None:
            said.append(f"{where} (no interval, n = {row['n']}).")
            continue
        side = "below 1" if row["high"] < 1 else "above 1" if row["low"] > 1 else "around 1"
        said.append(
            f"{where} (95 % interval {number(row['low'])} to {number(row['high'])}, {side}; "
            f"n = {row['n']})."
        )
    return said


FIGURE = Figure(
    name="filler-profile",
    shows="per head: original tokens without and with filler, aligned; the whole sequence, its "
    "span shaded",
    needs="an experiment with `profile` among its measures and a condition that inserts filler has "
    "them, such as the recipe filler-profile",
    numbers=_numbers,
    chart=_chart,
    words=_words,
    height=140,
    options=OPTIONS,
    claims=("fall", "one-factor"),
)
