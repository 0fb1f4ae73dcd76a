"""Draws the text of a prompt, each token shaded by the attention that it receives.

Drawn from `positions` and `tokens`.
"""

from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.caption import head_list_text
from attnscope.figures.charts.text import laid_out, shaded_text
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Option, Request
from attnscope.figures.numbers import rounded
from attnscope.figures.profiles import LEAVE_OUT_FIRST
from attnscope.figures.select import ProfileRows, conditions_in_order, select_profiles

BY = {
    "average": "Average attention weight: mean over the later queries that can see the token",
    "received": "Attention received: sum over queries",
}
MOST = 1_200
"""Largest number of tokens that are drawn."""


Context = tuple[ProfileRows, dict[str, Any], int]
"""The profiles; model, layer, head, prompt and condition; how many tokens the prompt has."""


def _numbers(request: Request) -> FigureNumbers[Context]:
    by = request.options["by"]
    selection = select_profiles(request.run, request.choice, panels=1)
    base = conditions_in_order(request.run, selection.frame["condition"].unique())[0]
    first = selection.frame.filter(pl.col("condition") == base).row(0, named=True)
    of = {c: first[c] for c in ("model", "layer", "head", "prompt", "condition")}
    read = request.run.tokens.filter(
        [pl.col(c) == first[c] for c in ("model", "prompt", "condition")]
    )
    known = read.select("position", pl.col("text").alias("token"), "class", "role").collect()
    full = (
        selection.frame.filter([pl.col(c) == value for c, value in of.items()])
        .select("position", pl.col(by).alias("value"))
        .join(known, on="position", how="left")
        .sort("position")
    )
    if request.options["leave_out_first"]:
        full = full.filter(pl.col("position") > 0)
    if full["value"].drop_nulls().is_empty():
        raise InputError(
            f"no token of prompt {of['prompt']} has a defined {by}; choose another prompt or head",
            code="all-undefined",
            measures=[by],
        )
    frame = rounded(laid_out(full.head(MOST), request.width or 780, request.theme))
    columns = ["position", "token", "class", "role", "value"]
    return FigureNumbers(
        data=frame.select(*columns, "shown", "line", "column", "at", "end"),
        settings={"value_title": BY[by].split(":")[0]},
        margin=0,
        context=(selection, of, full.height),
    )


def _text(numbers: FigureNumbers[Context], request: Request) -> FigureText:
    selection, of, total = numbers.context
    by, shades = request.options["by"], request.theme.sequential
    return FigureText(
        title="Attention that each token receives, in the text",
        caption=[
            "The darker a token, the more attention it receives; colour shows the square root of "
            "the value",
            head_list_text(pl.DataFrame([of])),
            f"{BY[by]}; queries: {selection.queries}; raw values; condition: {of['condition']}",
            f"n = 1: prompt {of['prompt']}",
            f"1 of {selection.total} heads in the run is shown" if selection.total > 1 else "",
            "The first token is not shown" if request.options["leave_out_first"] else "",
            f"The first {MOST:,} of {total:,} tokens" if total > MOST else "",
        ],
        models=[of["model"]],
        overview=f"The {numbers.data.height} tokens of a prompt in reading order, each on a "
        "background that is darker the more attention it gets.",
        axes=["none: the tokens are in the order of the text"],
        legend=[
            f"shade: from {shades[0]} (0) to {shades[-1]} (most)",
            "⏎: line break; ⇥: tab; ·: an invisible character",
        ],
        quantity=by,
        places={"position": "position {}", "token": "token “{}”"},
        notes=_most_attended(numbers.data),
        no_differences="The figure shows one prompt, so nothing is compared.",
    )


def _most_attended(frame: pl.DataFrame) -> list[str]:
    """The share of the most attended tokens in the sum of all."""
    known = sorted(frame["value"].drop_nulls().to_list(), reverse=True)
    tenth = max(1, len(known) // 10)
    total_weight = sum(known)
    if not total_weight:
        return []
    return [
        f"The {tenth} most attended of {len(known)} tokens have "
        f"{sum(known[:tenth]) / total_weight:.1%} of the sum of all."
    ]


FIGURE = Figure(
    name="text",
    shows="the tokens of a prompt, shaded by attention",
    needs="an experiment with `profile` among its measures has them, such as the recipe "
    "filler-profile",
    numbers=_numbers,
    chart=shaded_text,
    text=_text,
    options={
        "by": Option(help="`by`: average (default) or received", known=tuple(BY)),
        "leave_out_first": LEAVE_OUT_FIRST,
    },
)
