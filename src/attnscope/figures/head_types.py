"""Draws the type of each head, layers by heads, one colour per type.

Drawn from the table of `stats.classify_heads`, not from a run.
"""

from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
import vl_convert

from attnscope.figures.charts.common import figure_spec
from attnscope.figures.charts.matrix import EDGE
from attnscope.figures.export import as_csv, write
from attnscope.figures.figure import VEGA_LITE
from attnscope.figures.theme import PUBLISHED
from attnscope.stats.head_types import HEAD_TYPES, NONE

COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#e377c2", "#ff7f0e", "#9aa0a6", "#eef0f3")


def save_heads(
    folder: Path, table: pl.DataFrame, scores: pl.DataFrame, *, model: str, prompts: int
) -> None:
    """The table of heads and their scores as CSV, and the picture of their types."""
    for name, frame in {"heads.csv": table, "scores.csv": scores}.items():
        write(folder / name, as_csv(frame).encode())
    rules = "; ".join(f"{kind.name} > {kind.threshold:g}" for kind in HEAD_TYPES)
    svg = _svg(
        table,
        title=f"Head types of {model}",
        caption="Each cell is one head, coloured by its type. A head has a type if the 95 % "
        f"confidence interval of its score over {prompts} prompts lies above the threshold. Of "
        f"several types, the first in this order is drawn: {rules}. Layers and heads are "
        "counted from 0.",
    )
    write(folder / "heads.svg", svg.encode())
    write(folder / "heads.png", bytes(vl_convert.svg_to_png(svg, scale=2.0)))


def _svg(table: pl.DataFrame, *, title: str, caption: str) -> str:
    """`kind` at `layer` and `head` as SVG; the types in the order of the legend."""
    theme, types = PUBLISHED, [*(kind.name for kind in HEAD_TYPES), NONE]
    heads, layers = (table[name].unique().sort().to_list() for name in ("head", "layer"))
    step = max(5.0, min(24.0, 760 / len(heads)))
    tall = max(5.0, min(18.0, step))
    every = next(gap for gap in (1, 2, 5, 10, 20, 50) if gap * step >= theme.size * 1.5)
    above = next(gap for gap in (1, 2, 5, 10, 20, 50) if gap * tall >= theme.size * 1.2)
    axis: dict[str, Any] = {"ticks": False, "domain": False, "labelOverlap": False}
    scale = alt.Scale(paddingInner=0.06, paddingOuter=EDGE)
    chart = (
        alt.Chart(table.select("layer", "head", "kind"))
        .mark_rect()
        .encode(
            x=alt.X(
                "head:O",
                title="Head",
                scale=scale,
                axis=alt.Axis(values=[h for h in heads if h % every == 0], labelAngle=0, **axis),
            ),
            y=alt.Y(
                "layer:O",
                title="Layer",
                scale=scale,
                axis=alt.Axis(values=[n for n in layers if n % above == 0], **axis),
            ),
            color=alt.Color(
                "kind:N",
                title=None,
                scale=alt.Scale(domain=types, range=list(COLOURS[: len(types)])),
                legend=alt.Legend(orient="right", symbolType="square"),
            ),
        )
        .properties(width=step * len(heads), height=tall * len(layers))
    )
    width = max(step * len(heads) + 150, 420)
    spec = figure_spec(
        chart, title=title, caption=caption, alt_text=caption, width=width, theme=theme
    )
    svg: str = vl_convert.vegalite_to_svg(dict(spec), vl_version=VEGA_LITE)
    return svg
