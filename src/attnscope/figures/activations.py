"""Draws histograms of activations under two conditions, with four statistics of each.

Drawn from `activation_histogram`, `activations` and `activation_gini`.
"""

from typing import Any

import altair as alt
import polars as pl

from attnscope.figures.caption import layers_text, omissions, prompts_text
from attnscope.figures.charts.common import empty_row, panels, tooltips
from attnscope.figures.describe import FigureText
from attnscope.figures.figure import Figure, FigureNumbers, Request
from attnscope.figures.near_zero import AFTER, in_panels
from attnscope.figures.numbers import in_order, means, rounded
from attnscope.figures.select import AbsentError, ValueRows, select
from attnscope.figures.text_format import join, number
from attnscope.figures.theme import Style
from attnscope.stats.tables import possible

METRICS = {
    "near_zero": "near zero",
    "activation_l1": "L1",
    "activation_l2": "L2",
    "activation_gini": "Gini",
}
STEP = 0.05
"""Width of a bin."""


def _chart(frame: pl.DataFrame, style: Style, *, insets: dict[str, list[str]] | None = None) -> Any:
    """Bars of `value` from `place` to `end`, a `series` per condition, a panel per `panel`.

    `insets` has the lines of text in the corner of each panel.
    """
    series = frame["series"].unique(maintain_order=True).to_list()
    theme = style.theme
    colours = [theme.without, theme.filled, *theme.series_colours(len(series))][: len(series)]
    colour = alt.Color(
        "series:N",
        scale=alt.Scale(domain=series, range=colours),
        legend=alt.Legend(orient="top", title=None),
    )
    x = alt.X(
        "place:Q",
        title="Activation / 99th percentile of |activation| in the base",
        scale=alt.Scale(domain=[-1, 1], nice=False),
        axis=alt.Axis(grid=False),
    )

    def marks(part: pl.DataFrame, first: bool, width: float) -> list[Any]:
        y = alt.Y(
            "value:Q",
            title="Share (square-root scale)" if first else "",
            stack=None,
            scale=alt.Scale(type="sqrt", zero=True),
            axis=alt.Axis(grid=True, format=".2~g", tickCount=6),
        )
        base = alt.Chart(part).encode(x=x, color=colour)
        tooltip = tooltips(part, ["panel", "series", "place", "end", "value", "low", "high", "n"])
        bars = base.mark_bar(opacity=0.35, binSpacing=0).encode(
            x=alt.X("place:Q", title=x["title"], scale=x["scale"], bin="binned"),
            x2="end:Q",
            y=y,
            tooltip=tooltip,
        )
        steps = base.mark_line(interpolate="step-after", strokeWidth=1.4).encode(y=y)
        corner = alt.Chart(empty_row()).mark_text(
            text=(insets or {}).get(part["panel"][0], []),
            align="right",
            baseline="top",
            font=theme.mono,
            fontSize=theme.size - 1,
            lineHeight=theme.size + 4,
            style="faint-text",
        )
        return [bars, steps, corner.encode(x=alt.value(width - 4), y=alt.value(4))]

    return panels(frame, "panel", marks, style, gap=24).resolve_scale(color="shared")


def _numbers(request: Request) -> FigureNumbers[tuple[ValueRows, dict[str, list[str]]]]:
    selection, values = in_panels(
        request, select(request.run, request.choice, ["activation_histogram"])
    )
    base = request.run.experiment.base
    conditions = selection.conditions
    if request.choice.conditions is None:  # a pair
        conditions = [base, *(c for c in conditions if c != base)][:2]
        values = values.filter(pl.col("series").is_in(conditions))
    frame = means(
        values, ["panel", "series", "item"], request.units, possible("activation_histogram")
    )
    start = pl.col("item").cast(pl.Float64)
    frame = frame.with_columns(place=start, end=(start + STEP).round(2)).sort("place")
    names = values["panel"].unique(maintain_order=True).to_list()
    frame = rounded(in_order(frame.drop("item"), panel=names, series=conditions))
    insets = {name: _inset(request, name, conditions) for name in names}
    columns = ["panel", "series", "place", "end", "value", "low", "high", "n"]
    return FigureNumbers(
        measures=["activation_histogram"],
        data=frame.select(columns),
        settings={"insets": insets},
        width=560 if len(names) == 1 else 780,
        context=(selection, insets),
    )


def _inset(request: Request, panel: str, conditions: list[str]) -> list[str]:
    """One line per statistic: its mean over prompts under each condition."""
    lines = []
    for measure, name in METRICS.items():
        try:
            _, values = in_panels(request, select(request.run, request.choice, [measure]))
        except AbsentError:
            continue
        mean = means(values.filter(panel=panel), ["series"], request.units)
        by_condition = dict(mean.select("series", "value").iter_rows())
        known = [number(float(f"{by_condition[c]:.4g}")) for c in conditions if c in by_condition]
        lines.append(f"{name}: {' → '.join(known)}")
    return lines


def _text(
    numbers: FigureNumbers[tuple[ValueRows, dict[str, list[str]]]], request: Request
) -> FigureText:
    selection, insets = numbers.context
    conditions = numbers.data["series"].unique(maintain_order=True).to_list()
    inside = numbers.data.group_by("panel", "series").agg(pl.col("value").sum())["value"].to_list()
    beyond = 1 - min(inside)
    return FigureText(
        title="Distribution of activations under two conditions",
        caption=[
            "Each bar is the share of activations in a bin, mean over prompts, for "
            f"{join(conditions)}",
            f"{join(selection.model_names)}, {layers_text(selection.layers)}, {AFTER}",
            f"At most {number(float(f'{beyond:.2g}'))} of the activations lie beyond the axis",
            "Corner, for the conditions in the order of the legend: share of activations near zero "
            "(below ε of the base), mean L1 and L2 norm of a token's activations, Gini coefficient "
            "of absolute values",
            prompts_text(request, numbers.data),
            *omissions(selection),
        ],
        models=selection.model_names,
        overview=f"Overlaid histograms, one for each of {join(conditions)}.",
        axes=[
            "x: activation, in units of the 99th percentile of |activation| in the base",
            "y: share, on a square-root scale",
        ],
        legend=list(conditions),
        quantity="share",
        places={"panel": "{}", "series": "{}", "place": "from {}"},
        split=["panel", "series"],
        notes=[f"{panel}: {'; '.join(lines)}." for panel, lines in insets.items()],
        no_differences="Single bins are not tested; `attnscope compare` tests the four statistics.",
    )


FIGURE = Figure(
    name="activations",
    shows="histograms of activations under two conditions, with four statistics: share near "
    "zero, L1, L2, Gini",
    needs="an experiment with `activation_histogram` among its measures has them",
    numbers=_numbers,
    chart=_chart,
    text=_text,
    claims=("livelier-activations",),
)
