"""Figures of tables that no run holds: scores under conditions, effects of cutting heads.

The same words, looks and files as a run's figures have. This module must not know any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import polars as pl

from attnscope.figures.describe import Words, described
from attnscope.figures.figure import Drawing
from attnscope.figures.theme import Look, theme_named


def drawing(
    name: str,
    data: pl.DataFrame,
    words: Words,
    chart: Callable[[pl.DataFrame, Look], Any],
    *,
    width: float,
    height: float,
    theme: str = "published",
) -> Drawing:
    """A figure of a table: a chart of its numbers, and words about them."""
    look = Look(theme=theme_named(theme, dark=False), width=width, height=height)
    sections, alt_text = described(data, words)
    said = " ".join(f"{part.rstrip('.')}." for part in words.caption if part)

    def make(screen: bool) -> Mapping[str, Any]:
        from attnscope.figures.charts.parts import finish

        return finish(
            chart(data, look),
            title=words.title,
            caption=said,
            alt_text=alt_text,
            width=width + 60,
            theme=look.theme,
        )

    return Drawing(
        name=name,
        title=words.title,
        data=data,
        caption=said,
        sections=sections,
        alt=alt_text,
        theme=look.theme,
        make=make,
        zooms=False,
    )
