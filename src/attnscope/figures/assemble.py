"""A figure put together from its chart, data and words: the last step of every figure.

This module must not know any single figure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl

from attnscope.figures.describe import Words, describe
from attnscope.figures.figure import Figure
from attnscope.figures.layout import finish
from attnscope.figures.style import Style

__all__ = ["assemble"]


def assemble(
    name: str,
    chart: Callable[[], Any],
    data: pl.DataFrame,
    words: Words,
    *,
    caption: str,
    style: Style,
    width: float,
    differences: pl.DataFrame | None = None,
    interactive: Callable[[], Any] | None = None,
) -> Figure:
    """The figure. `chart` makes its chart; `interactive` that for the screen, if it is another."""
    described = describe(data, words, differences)

    def whole(make: Callable[[], Any]) -> dict[str, Any]:
        return finish(
            make(),
            title=words.title,
            caption=caption,
            alt_text=described.alt,
            width=width,
            theme=style.theme,
        )

    return Figure(
        name=name,
        title=words.title,
        on_paper=lambda: whole(chart),
        on_screen=None if interactive is None else lambda: whole(interactive),
        data=data,
        caption=caption,
        description=described.markdown,
        alt=described.alt,
        theme=style.theme,
    )
