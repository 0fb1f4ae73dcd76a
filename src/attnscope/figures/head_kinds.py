"""Every head by its kind: layers by heads, one colour for each kind.

Drawn from the table of `stats.head_kinds`, not from a run. This module must not know models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl
import vl_convert

from attnscope.figures.charts.parts import finish
from attnscope.figures.figure import VEGA_LITE
from attnscope.figures.theme import PUBLISHED, Theme

COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#e377c2", "#ff7f0e", "#9aa0a6", "#eef0f3")


def head_kinds_svg(
    table: pl.DataFrame,
    kinds: Sequence[str],
    *,
    title: str,
    caption: str,
    theme: Theme = PUBLISHED,
) -> str:
    """`kind` at `layer` and `head` as SVG; the kinds in the order of the legend."""
    heads, layers = (table[name].unique().sort().to_list() for name in ("head", "layer"))
    step = max(5.0, min(24.0, 760 / len(heads)))
    tall = max(5.0, min(18.0, step))
    every = next(gap for gap in (1, 2, 5, 10, 20, 50) if gap * step >= theme.size * 1.5)
    above = next(gap for gap in (1, 2, 5, 10, 20, 50) if gap * tall >= theme.size * 1.2)
    axis: dict[str, Any] = {"ticks": False, "domain": False, "labelOverlap": False}
    scale = alt.Scale(paddingInner=0.06, paddingOuter=0)
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
                scale=alt.Scale(domain=list(kinds), range=list(COLOURS[: len(kinds)])),
                legend=alt.Legend(orient="right", symbolType="square"),
            ),
        )
        .properties(width=step * len(heads), height=tall * len(layers))
    )
    width = max(step * len(heads) + 150, 420)
    spec = finish(chart, title=title, caption=caption, alt_text=caption, width=width, theme=theme)
    svg: str = vl_convert.vegalite_to_svg(dict(spec), vl_version=VEGA_LITE)
    return svg
