"""Draws λ against the length of the filler.

Drawn from `lambda` and the cells' numbers of filler tokens.
"""

from typing import Any

import polars as pl

from attnscope.errors import InputError
from attnscope.figures.caption import heads_text, line_caption
from attnscope.figures.charts.common import series_legend
from attnscope.figures.charts.lines import lines_over
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import COMBINE, Figure, FigureNumbers, Request
from attnscope.figures.lambda_heads import NEEDS, TITLE, slope
from attnscope.figures.numbers import in_order, means, rounded
from attnscope.figures.select import ValueRows, condition_fillers, select, thin
from attnscope.figures.text_format import join
from attnscope.figures.theme import Style
from attnscope.stats.tables import combine, possible

MOST = 8
"""Largest number of layers shown by default."""


Context = tuple[ValueRows, int, list[str], list[str]]
"""The rows; how many layers the run has; the fillers; conditions whose filler has one length only,
which are not shown."""


def _chart(frame: pl.DataFrame, style: Style) -> Any:
    """λ (`value`, `low`, `high`) over `filler_tokens`, a line per `layer`, a panel per `panel`."""
    x = {"x": "filler_tokens", "x_title": "Filler tokens"}
    return lines_over(frame, style, **x, y_title=TITLE, rule=1.0)


def _numbers(request: Request) -> FigureNumbers[Context]:
    selection = select(request.run, request.choice, ["lambda"])
    total = len(selection.layers)
    if request.choice.layers is None:
        selection = selection.restrict(layers=thin(selection.layers, MOST))
    lengths = request.run.cells.group_by("model", "condition").agg(pl.col("filler_tokens").mean())
    fillers = condition_fillers(request.run)
    values = combine(selection.frame, request.combine)
    within = possible("lambda", heads=request.combine)
    frame = means(values, ["model", "condition", "layer"], request.units, within)
    frame = frame.join(lengths, on=["model", "condition"]).with_columns(
        pl.col("condition").replace_strict(fillers, default="filler").alias("filler")
    )
    # A line has one filler text at one place; other texts or places get their own panel.
    several = pl.col("filler_tokens").n_unique().over("model", "filler") > 1
    lone = set(frame.filter(~several)["condition"])
    frame = frame.filter(several)
    if frame.is_empty():
        raise InputError(
            "this run has filler of one length only; an experiment with the same filler in several "
            "lengths (conditions with different `count`) has them",
            code="one-length-only",
            conditions=selection.conditions,
        )
    drawn = frame["filler"].unique().sort().to_list()
    panel = pl.format("{}, {}", "model", "filler") if len(drawn) > 1 else pl.col("model")
    frame = in_order(frame.sort("filler", "layer", "filler_tokens"), model=selection.models)
    columns = ["condition", "filler_tokens", "layer", "value", "low", "high", "n", "unreliable"]
    frame = rounded(frame.select(panel.alias("panel"), *columns))
    return FigureNumbers(
        measures=["lambda"],
        data=frame,
        width={1: 520, 2: 720}.get(frame["panel"].n_unique(), 800),
        context=(selection, total, drawn, [name for name in selection.conditions if name in lone]),
    )


def _text(numbers: FigureNumbers[Context], request: Request) -> FigureText:
    selection, total, fillers, lone = numbers.context
    others = f"; not shown, because there is only one length: {join(lone)}" if lone else ""
    return FigureText(
        title="λ against the length of the filler",
        caption=line_caption(
            *(
                request,
                numbers.data,
                selection,
                heads_text(request.run, request.combine, selection),
            ),
            "Each line is λ of one layer over the number of filler tokens; 1 means no change",
            f"Filler: {'; '.join(fillers)}{others}",
            f"{slope(selection)}; filler tokens: mean over prompts",
            total=total,
        ),
        models=selection.models,
        overview="Lines of λ over the number of filler tokens, a line per layer; panels: "
        f"{', '.join(numbers.data['panel'].unique(maintain_order=True))}. A dashed line at 1 is no "
        "change.",
        axes=["x: filler tokens", "y: λ"],
        legend=series_legend([f"layer {layer}" for layer in selection.layers], request.theme),
        quantity="λ",
        places={"panel": "{}", "layer": "layer {}", "filler_tokens": "{} filler tokens"},
        order="filler_tokens",
        split=["panel"],
        no_differences="λ already compares two conditions: 1 means no difference.",
    )


FIGURE = Figure(
    name="lambda-length",
    shows="λ against the filler's length",
    needs=NEEDS,
    numbers=_numbers,
    chart=_chart,
    text=_text,
    options={"combine": COMBINE},
)
