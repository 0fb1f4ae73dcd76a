"""The attention that original tokens receive, without and with filler."""

from dataclasses import replace

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.figure import Figure, Numbers, Request
from attnscope.figures.numbers import means, rounded
from attnscope.figures.profiles import (
    KEYS,
    OPTIONS,
    chosen_conditions,
    measure_of_heads,
    profile_numbers,
    select_profiles,
)
from attnscope.figures.shapes.profile import HEAD_COLUMNS, Profile
from attnscope.figures.text_format import number

ORIGINAL, WHOLE = "original tokens", "whole sequence"


def _numbers(request: Request, figure: Figure) -> Numbers:
    base = request.run.experiment.base
    (variant,) = chosen_conditions(request, request.run.experiment.variants[:1], 1)
    selection, heads = select_profiles(request, [base, variant])
    shown = heads.head(3) if request.choice.heads is None else heads
    is_base = pl.col("condition") == base
    series = pl.when(is_base).then(pl.lit("without filler")).otherwise(pl.lit("with filler"))
    rows = selection.frame.sort(~is_base, maintain_order=True).with_columns(
        series=series, prompt_position="position"
    )
    # A base token is drawn if a token of the variant is aligned with it. Boundary tokens are not.
    of_token = ["model", "prompt", "layer", "head", "aligned_position"]
    known = rows.filter(pl.col("aligned_position").is_not_null())
    original = known.join(known.filter(~is_base).select(of_token), on=of_token, how="semi")
    original = original.with_columns(
        position="aligned_position", prompt_position="aligned_position"
    )
    if original.is_empty():
        raise InputError(
            f"no token of {variant!r} has an aligned position in {base!r}; choose another "
            "condition",
            code="nothing-aligned",
            condition=variant,
        )
    panels = {ORIGINAL: original, WHOLE: rows.filter(~is_base)}
    about = f"{variant} against {base}"
    numbers = profile_numbers(request, (shown, heads.height), selection, panels, about)
    lambdas = _lambdas(request, *measure_of_heads(request, shown, selection, "lambda"))
    return replace(numbers, notes=[*lambdas, *numbers.notes])


def _lambdas(request: Request, values: pl.DataFrame, keys: str) -> list[str]:
    """λ of the shown heads over all prompts, if the run has it."""
    notes = []
    for row in rounded(means(values, HEAD_COLUMNS, request.units)).iter_rows(named=True):
        where = f"{row['model']}, layer {row['layer']}, head {row['head']}: λ{keys}"
        ends = f"95 % interval {number(row['low'])} to {number(row['high'])}"
        ends = "no interval" if row["low"] is None else ends
        notes.append(f"{where} = {number(row['value'])} ({ends}, n = {row['n']}).")
    return notes


FIGURE = Figure(
    name="filler-profile",
    shows="per head: original tokens without and with filler, aligned; the full sequence with the "
    "filler shaded",
    by=KEYS,
    shape=Profile(
        panel_titles={
            ORIGINAL: "original token (filler cut out)",
            WHOLE: "token of the whole sequence",
        },
    ),
    numbers=_numbers,
    differences="Differences per token are not tested; λ over all prompts is under Notes if the "
    "run has it.",
    title="Attention with and without filler",
    what="Lines are the average attention weight that each original token receives, without and "
    "with filler",
    quantity="average attention weight",
    needs="an experiment with `profile` among its measures and a condition that inserts filler has "
    "them, such as the recipe filler-profile",
    height=140,
    options=OPTIONS,
)
