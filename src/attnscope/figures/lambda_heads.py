"""Draws λ of each head: the factor by which filler scales attention to the original tokens.

Drawn from `lambda`.
"""

from typing import Any

import polars as pl

from attnscope.figures.caption import keys_text, layers_text, omissions, prompts_text
from attnscope.figures.charts.dots import head_dots
from attnscope.figures.charts.matrix import head_matrices
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Request
from attnscope.figures.numbers import in_order, intervals, means, rounded
from attnscope.figures.select import ValueRows, select
from attnscope.figures.text_format import join
from attnscope.figures.theme import Style
from attnscope.stats.tables import possible

NEEDS = (
    "an experiment with `lambda` among its measures and a condition that inserts filler has it, "
    "such as the recipe filler-profile"
)
TITLE = "λ (1: unchanged)"
DOTS = 96
"""Largest number of heads per panel that are drawn as dots; more are drawn as a matrix."""


def slope(selection: ValueRows) -> str:
    """The definition of λ for a caption."""
    return (
        "λ: slope through the origin of the average attention weight with filler on that "
        f"without, over aligned tokens; queries: {selection.queries}; {keys_text(selection.keys)}; "
        "raw values"
    )


def _chart(frame: pl.DataFrame, style: Style) -> Any:
    """λ (`value`) with its interval per `layer` and `head`, a panel each.

    Columns: `panel`, `layer`, `head`, `value`, `low`, `high`, `differs`. More than 96 heads in a
    panel become a matrix, with a dot if the interval excludes 1.
    """
    if max(part.height for part in frame.partition_by("panel")) <= DOTS:
        return head_dots(frame, style, y_title=TITLE, rule=1.0)
    far = max((abs(v - 1) for v in frame["value"].drop_nulls()), default=0.0) or 1.0
    return head_matrices(
        frame,
        style,
        panel="panel",
        value_title=TITLE,
        domain=[1 - far, 1 - far / 2, 1, 1 + far / 2, 1 + far],
        colours=style.theme.diverging,
        marked="differs",
    )


def _numbers(request: Request) -> FigureNumbers[ValueRows]:
    selection = select(request.run, request.choice, ["lambda"])
    frame = means(
        selection.frame, ["model", "condition", "layer", "head"], request.units, possible("lambda")
    )
    frame = frame.sort("layer", "head")
    frame = in_order(frame, model=selection.models, condition=selection.conditions)
    several = len(selection.conditions) > 1
    panel = pl.format("{}, {}", "model", "condition") if several else pl.col("model")
    differs = ((pl.col("low") > 1) | (pl.col("high") < 1)).fill_null(False)
    columns = ["model", "condition", "layer", "head", "value", "low", "high", "n", "unreliable"]
    frame = rounded(frame.select(panel.alias("panel"), *columns, differs.alias("differs")))
    return FigureNumbers(
        measures=["lambda"],
        data=frame,
        width=560 if frame["panel"].n_unique() == 1 else 780,
        context=selection,
    )


def _text(numbers: FigureNumbers[ValueRows], request: Request) -> FigureText:
    selection, names = numbers.context, numbers.data["panel"].unique(maintain_order=True).to_list()
    return FigureText(
        title="λ, by head",
        caption=[
            "Each value is λ of one head; below 1, filler lowers the attention that the original "
            "tokens receive",
            f"{join(selection.models)}, {layers_text(selection.layers)}",
            f"{slope(selection)}; {join(selection.conditions)} against the base",
            prompts_text(request, numbers.data, interval=intervals(numbers.data)),
            *omissions(selection),
        ],
        models=selection.models,
        overview="λ per layer and head, its 95 % interval beside it, against 1, which is no "
        f"change; {len(names)} panels: {', '.join(names)}.",
        axes=["x: layer and head, from 0", "y: λ (in a matrix: colour)"],
        legend=["dashed line: λ = 1, attention unchanged by filler"],
        quantity="λ",
        places={"panel": "{}", "layer": "layer {}", "head": "head {}"},
        split=["panel"],
        notes=[
            _against_one(part) for part in numbers.data.partition_by("panel", maintain_order=True)
        ],
        no_differences="λ already compares two conditions: 1 means no difference (see Notes).",
    )


def _against_one(part: pl.DataFrame) -> str:
    tested = part.filter(pl.col("low").is_not_null())
    if tested.is_empty():
        return f"{part['panel'][0]}: there are no intervals, so change is not tested."
    below = tested.filter(pl.col("high") < 1).height
    above = tested.filter(pl.col("low") > 1).height
    return (
        f"{part['panel'][0]}: of {tested.height} heads, attention falls in {below} (interval below "
        f"1), rises in {above} (above 1), and is undetermined in {tested.height - below - above}."
    )


FIGURE = Figure(
    name="lambda",
    shows="λ of each head",
    needs=NEEDS,
    numbers=_numbers,
    chart=_chart,
    text=_text,
    height=230,
    claims=("fall", "one-factor"),
)
